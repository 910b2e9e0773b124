"""Elementary functions in C++ that the compiler can vectorise: no branches, no tables, no calls.

The float32 functions are accurate to about 2 units in the last place, with or without fused products, for every
argument. Zeros of either sign, subnormals, infinities and NaN give the results of <cmath>. Coefficients without a named
source are minimax fits of the relative error. The float64 functions are the C library's, and so are float32 sin and
cos, whose huge arguments need a table.
"""

from __future__ import annotations

_SCALE = """\
// q 2^n, 2^n as two factors, so that results fade to 0 and grow to infinity as they should.
static inline float scale_by_power(float q, int32_t n) {
  const int32_t half = n >> 1;
  return q * as_float(uint32_t(half + 127) << 23) * as_float(uint32_t(n - half + 127) << 23);
}
"""

_EXP = """\
// exp(r) of the reduced argument by the polynomial of Cephes expf. Clamping by comparison keeps NaN.
static inline float op_exp(float x) {
  const float above = x < -104.0f ? -104.0f : x;
  const float y = above > 89.0f ? 89.0f : above;
  const float shifted = y * 1.44269504088896341f + 12582912.0f;  // rounds to an integer in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  float q = 1.9875691500e-4f;
  q = q * r + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  q = (q * (r * r) + r) + 1.0f;
  return scale_by_power(q, int32_t(as_bits(shifted) - 0x4b400000u));
}
"""

_EXP2 = """\
static inline float op_exp2(float x) {
  const float above = x < -151.0f ? -151.0f : x;
  const float y = above > 129.0f ? 129.0f : above;
  const float shifted = y + 12582912.0f;  // rounds to an integer in the low bits
  const float r = y - (shifted - 12582912.0f);
  float q = 1.5345807e-4f;
  q = q * r + 1.3399931e-3f;
  q = q * r + 9.6184890e-3f;
  q = q * r + 5.5503288e-2f;
  q = q * r + 2.4022647e-1f;
  q = q * r + 6.9314721e-1f;
  return scale_by_power(q * r + 1.0f, int32_t(as_bits(shifted) - 0x4b400000u));
}
"""

_EXPM1 = """\
// Near 0 the Taylor series; elsewhere exp(x) - 1 loses nothing.
static inline float op_expm1(float x) {
  float q = 1.0f / 40320.0f;
  q = q * x + 1.0f / 5040.0f;
  q = q * x + 1.0f / 720.0f;
  q = q * x + 1.0f / 120.0f;
  q = q * x + 1.0f / 24.0f;
  q = q * x + 1.0f / 6.0f;
  q = q * x + 0.5f;
  const float near = __builtin_copysignf(q * (x * x) + x, x), far = op_exp(x) - 1.0f;
  return __builtin_fabsf(x) < 0.5f ? near : far;
}
"""

_LOG_AND = """\
// log(u) + c of a normal u > 0 and a small c: u is 2^n (1 + f), with 1 + f between sqrt(1/2) and sqrt(2).
static inline float log_and(float u, float c) {
  const uint32_t above = as_bits(u) - 0x3f3504f3u;
  const float n = float(int32_t(above) >> 23);
  const float f = as_float((above & 0x7fffffu) + 0x3f3504f3u) - 1.0f;
  float q = 6.7466013e-2f;
  q = q * f - 1.1675641e-1f;
  q = q * f + 1.1888175e-1f;
  q = q * f - 1.2405591e-1f;
  q = q * f + 1.4219551e-1f;
  q = q * f - 1.6667996e-1f;
  q = q * f + 2.0002119e-1f;
  q = q * f - 2.5000009e-1f;
  q = q * f + 3.3333313e-1f;
  const float z = f * f;
  return n * 0.693359375f + (f + ((z * (q * f) + (c - n * 2.12194440e-4f)) - 0.5f * z));
}
"""

_LOG = """\
static inline float op_log(float x) {
  const bool tiny = x < 0x1p-126f;
  const float u = tiny ? x * 0x1p23f : x;
  const float inside = log_and(u, 0.0f) - (tiny ? 15.9423847f : 0.0f);
  const float positive = x < __builtin_inff() ? inside : x;
  const float real = x < 0.0f ? __builtin_nanf("") : positive;
  return x == 0.0f ? -__builtin_inff() : real;
}
"""

_LOG1P = """\
// log(1 + x), with what 1 + x rounds away put back to first order. It has the sign of x, at 0 too.
static inline float op_log1p(float x) {
  const float u = 1.0f + x;
  const float lost = (x < 1.0f ? x : 1.0f) - (u - (x < 1.0f ? 1.0f : x));
  const float inside = __builtin_copysignf(log_and(u, lost / u), x);
  const float above = x < __builtin_inff() ? inside : x;
  const float real = x < -1.0f ? __builtin_nanf("") : above;
  return x == -1.0f ? -__builtin_inff() : real;
}
"""

_ERF = """\
// Near 0 x + x p(x^2); elsewhere 1 - exp(t p(t)), which is 1 from 4 on.
static inline float op_erf(float x) {
  const float magnitude = __builtin_fabsf(x), z = x * x, t = magnitude > 4.0f ? 4.0f : magnitude;
  float q = 8.316775e-5f;
  q = q * z - 8.130012e-4f;
  q = q * z + 5.1999069e-3f;
  q = q * z - 2.6858941e-2f;
  q = q * z + 1.1283688e-1f;
  q = q * z - 3.7612632e-1f;
  q = q * z + 1.2837917e-1f;
  float p = -1.1231275e-5f;
  p = p * t + 3.2280356e-4f;
  p = p * t - 3.6424580e-3f;
  p = p * t + 2.3762060e-2f;
  p = p * t - 1.0623688e-1f;
  p = p * t - 6.3515133e-1f;
  p = p * t - 1.1286485f;
  const float near = q * x + x, far = __builtin_copysignf(1.0f - op_exp(p * t), x);
  return magnitude < 0.925f ? near : far;
}
"""

_TANH = """\
// Near 0 the polynomial of Cephes tanhf; elsewhere by exp, which is exact at both infinities and keeps NaN.
static inline float op_tanh(float x) {
  const float z = x * x;
  float q = -5.70498872745e-3f;
  q = q * z + 2.06390887954e-2f;
  q = q * z - 5.37397155531e-2f;
  q = q * z + 1.33314422036e-1f;
  q = q * z - 3.33332819422e-1f;
  const float magnitude = __builtin_fabsf(x);
  const float near = q * z * magnitude + magnitude;
  const float far = 1.0f - 2.0f / (op_exp(2.0f * magnitude) + 1.0f);
  return __builtin_copysignf(magnitude < 0.625f ? near : far, x);
}
"""

_SOFTPLUS = """\
// log(1 + exp(x)) as max(x, 0) + log(1 + u), with u = exp(-|x|) at most 1.
static inline float op_softplus(float x) {
  const float u = op_exp(-__builtin_fabsf(x));
  float q = 5.2326931e-3f;
  q = q * u - 2.9505240e-2f;
  q = q * u + 7.8225955e-2f;
  q = q * u - 1.3663246e-1f;
  q = q * u + 1.9106007e-1f;
  q = q * u - 2.4842982e-1f;
  q = q * u + 3.3319098e-1f;
  q = q * u - 4.9999493e-1f;
  q = q * u + 9.9999994e-1f;
  return (x > 0.0f ? x : 0.0f) + u * q;
}
"""

_SOFTPLUS_OF_LIBRARY = """\
static inline T op_softplus(T x) { return (x > T(0) ? x : T(0)) + op_log1p(op_exp(-op_abs(x))); }
"""

_POW = """\
// 2^(y log2 |x|) in double, which leaves one rounding; negative x has powers of whole y only.
static inline float op_pow(float x, float y) {
  const float magnitude = __builtin_fabsf(x);
  const bool tiny = magnitude < 0x1p-126f;
  const uint32_t above = as_bits(tiny ? magnitude * 0x1p23f : magnitude) - 0x3f3504f3u;
  const double f = double(as_float((above & 0x7fffffu) + 0x3f3504f3u)) - 1.0;
  double q = 0.07736945430680289;
  q = q * f - 0.14283864553441172;
  q = q * f + 0.14474856173598083;
  q = q * f - 0.14315662406954557;
  q = q * f + 0.15876980469228444;
  q = q * f - 0.18030058674909194;
  q = q * f + 0.20617535859590247;
  q = q * f - 0.24045316617703538;
  q = q * f + 0.2885372935056688;
  q = q * f - 0.36067367481804974;
  q = q * f + 0.4808983613950832;
  q = q * f - 0.7213475208688054;
  q = q * f + 1.4426950408687056;
  const double inside = double((int32_t(above) >> 23) - (tiny ? 23 : 0)) + q * f;
  const double finite = magnitude < __builtin_inff() ? inside : double(magnitude);
  const double base = magnitude == 0.0f ? -__builtin_inf() : finite;
  const double full = base == 0.0 ? 0.0 : base * double(y);
  const double product = y == 0.0f ? 0.0 : full;
  const double low = product < -160.0 ? -160.0 : product;
  const double exponent = low > 130.0 ? 130.0 : low;
  const double shifted = exponent + 0x1.8p52;  // rounds to an integer in the low bits
  const double r = exponent - (shifted - 0x1.8p52);
  double p = 1.5201917100193832e-05;
  p = p * r + 0.00015469291169846933;
  p = p * r + 0.0013333922583141978;
  p = p * r + 0.009618027253575337;
  p = p * r + 0.055504103534229826;
  p = p * r + 0.2402265119815787;
  p = p * r + 0.6931471807284553;
  p = p * r + 1.0;
  uint64_t bits;
  __builtin_memcpy(&bits, &shifted, 8);
  bits = (bits + 1023) << 52;
  double power;
  __builtin_memcpy(&power, &bits, 8);
  const float value = float(p * power), half = y * 0.5f;
  const bool whole = __builtin_floorf(y) == y, odd = whole & (__builtin_floorf(half) != half);
  const float real = odd ? __builtin_copysignf(value, x) : value;
  return (x < 0.0f) & (x > -__builtin_inff()) & !whole ? __builtin_nanf("") : real;
}
"""

_FLOAT = {
    "scale_by_power": _SCALE,
    "op_exp": _EXP,
    "op_exp2": _EXP2,
    "op_expm1": _EXPM1,
    "log_and": _LOG_AND,
    "op_log": _LOG,
    "op_log1p": _LOG1P,
    "op_erf": _ERF,
    "op_tanh": _TANH,
    "op_softplus": _SOFTPLUS,
    "op_pow": _POW,
}
_DOUBLE = {"op_softplus": _SOFTPLUS_OF_LIBRARY}


def _library(name: str, double: bool) -> str:
    parameters, arguments = ("T x, T y", "x, y") if name == "pow" else ("T x", "x")
    builtin = {"abs": "fabs"}.get(name, name) + ("" if double else "f")
    return f"static inline T op_{name}({parameters}) {{ return __builtin_{builtin}({arguments}); }}\n"


def functions(double: bool) -> dict[str, str]:
    """Returns the source of every elementary function and helper by name. Each function follows those that it calls."""
    written = _DOUBLE if double else _FLOAT
    names = ("abs", "sqrt", "floor", "ceil", "sin", "cos", "exp", "exp2", "expm1", "log", "log1p", "erf", "tanh", "pow")
    library = {f"op_{name}": _library(name, double) for name in names}
    return {name: text for name, text in library.items() if name not in written} | written
