"""The custom ops of captured graphs: schema, implementation, fake, gradient, and Inductor lowering.

Importing this package defines all of them, as ``torch.ops.gnncompile.<name>``.
"""

import gnncompile.ops.colors
import gnncompile.ops.embedding
import gnncompile.ops.exchange
import gnncompile.ops.gemm
import gnncompile.ops.gradient
import gnncompile.ops.higher_order
import gnncompile.ops.matching
import gnncompile.ops.matrix_copies
import gnncompile.ops.moments
import gnncompile.ops.opaque
import gnncompile.ops.own_and_halo_edges
import gnncompile.ops.prepared
import gnncompile.ops.region
import gnncompile.ops.sampling
import gnncompile.ops.seal
import gnncompile.ops.segment
import gnncompile.ops.segment_gradients
import gnncompile.ops.sorted_edges
import gnncompile.ops.stored
import gnncompile.ops.structure  # noqa: F401
