// Samples neighbourhoods hop by hop, on all cores. cpu.py calls `sample_neighborhood` and mirrors the structures.
//
// Random numbers are a function of the seed, the hop, the relation, the position of a node and the index of the draw
// (SplitMix64: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014). Local ids follow the order
// of the edges. So the result is the same bits for every number of threads.

#include <sys/mman.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace {

using i64 = std::int64_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// -- what cpu.py passes ------------------------------------------------------------------------------------------------

enum Status : i64 { OK, NO_MEMORY, ROW_OUT_OF_RANGE, BAD_WEIGHT, NO_WEIGHT, TIMES_NOT_SORTED, TOO_LARGE };

// int32 or int64 numbers.
struct Ints {
  const void* data;
  i64 is_wide;

  i64 operator[](i64 at) const {
    return is_wide ? static_cast<const i64*>(data)[at] : static_cast<const std::int32_t*>(data)[at];
  }
  void prefetch(i64 at) const { __builtin_prefetch(static_cast<const char*>(data) + at * (is_wide ? 8 : 4)); }
};

// The edges between two node types, in CSC order.
struct Relation {
  i64 source, target;    // node types
  i64 num_edges;
  Ints colptr, row;      // [num_targets + 1], [num_edges]
  const i64* fan_outs;   // [num_hops]
  const i64* node_time;  // [num_sources] or null
  const i64* edge_time;  // [num_edges] or null
  const void* weight;    // [num_edges] or null
  i64 is_double;         // whether weights are float64; float32 otherwise

  double weight_of(i64 edge) const {
    return is_double ? static_cast<const double*>(weight)[edge] : static_cast<const float*>(weight)[edge];
  }
};

struct Request {
  i64 num_types, num_relations, num_hops, num_batches, threads;
  u64 seed;
  i64 replace, disjoint, last, induced;
  const Relation* relations;  // [num_relations]
  const i64* num_nodes;       // [num_types]
  const i64* const* seeds;    // [num_types], each [num_seeds]
  const i64* num_seeds;       // [num_types]
  const i64* first_batch;     // [num_types]: the batch of each type's first seed
  const i64* seed_times;      // [num_batches] or null
};

// Returns memory for `std::free`, in huge pages where the system has them and the memory fills one.
void* allocate(std::size_t bytes) {
  constexpr std::size_t PAGE = std::size_t(1) << 21;
  void* found = bytes < PAGE ? std::malloc(bytes) : std::aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
  if (!found) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (bytes >= PAGE) madvise(found, bytes, MADV_HUGEPAGE);
#endif
  return found;
}

// A tensor that grows. cpu.py gives it memory of earlier calls, and takes the memory back.
struct Column {
  i64* data;
  i64 size, capacity;

  // Returns the first of `more` new elements.
  i64* extend(i64 more) {
    if (size + more > capacity) {
      const i64 wanted = std::max(size + more, capacity + capacity / 2);
      i64* found = static_cast<i64*>(allocate(wanted * sizeof(i64)));
      std::copy(data, data + size, found);
      std::free(data);
      data = found;
      capacity = wanted;
    }
    size += more;
    return data + size - more;
  }
};

struct Answer {
  Column *node, *batch;      // [num_types]
  Column *row, *col, *edge;  // [num_relations]
  i64* nodes_per_hop;        // [num_types, num_hops + 1]
  i64* edges_per_hop;        // [num_relations, num_hops]
  i64 relation, position;    // where an error was found: the relation, and an edge or a target
};

// -- random numbers ----------------------------------------------------------------------------------------------------

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15;

template <typename Number>
inline Number mix(Number z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

struct Draws {
  u64 state;

  u64 next() { return mix(state += GOLDEN); }
  // A number in [0, limit). The bias is below limit / 2^64.
  i64 below(i64 limit) { return static_cast<i64>((static_cast<unsigned __int128>(next()) * limit) >> 64); }
  // Writes below(limit), below(limit + 1), and so on, `count` numbers. Each follows from its index alone, so the
  // compiler computes eight at once. There has to be room for a multiple of eight.
  void below_each(i64 limit, i64 count, u64* out) {
    if (limit + count >= i64(1) << 32) {
      for (i64 n = 0; n < count; ++n) out[n] = below(limit + n);
      return;
    }
    const i64 padded = (count + 7) / 8 * 8;
    const u64 from = state;
    for (i64 n = 0; n < padded; ++n) {
      const u64 z = mix(from + GOLDEN * static_cast<u64>(n + 1)), most = static_cast<u64>(limit + n);
      // The upper half of a product of 64 and 32 bits, from products that vector units have.
      out[n] = ((z >> 32) * most + ((z & 0xffffffff) * most >> 32)) >> 32;
    }
  }
  // A number in (0, 1).
  double uniform() { return (static_cast<double>(next() >> 12) + 0.5) * 0x1p-52; }
};

// -- local ids ---------------------------------------------------------------------------------------------------------

// Memory in huge pages, where the system has them: reads of a table go to random pages.
template <typename T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <typename U>
  HugePages(const HugePages<U>&) {}

  T* allocate(std::size_t number) { return static_cast<T*>(::allocate(number * sizeof(T))); }
  void deallocate(T* data, std::size_t) { std::free(data); }
  bool operator==(const HugePages&) const { return true; }
  bool operator!=(const HugePages&) const { return false; }
};

// A hash table from nodes to local ids. The largest word marks an empty slot.
template <typename Key>
class HashTable {
 public:
  static constexpr bool HAS_BATCHES = true;
  using Word = Key;
  static constexpr Word EMPTY = ~Word(0);
  struct Slot {
    Word key, id;
  };

  // Forgets all entries. `keys` are the keys that there may be, and `entries` those that are expected at first.
  void clear(i64 keys, i64 entries) {
    size_ = 0;
    allocate(slots_, entries);
  }

  // A subgraph has fewer rows.
  static i64 limit() { return static_cast<i64>(EMPTY / 2); }

  // Makes room for `entries` in all.
  void reserve(i64 entries) {
    if (2 * entries <= capacity()) return;
    std::swap(slots_, spare_);
    allocate(slots_, entries);
    for (const Slot& slot : spare_)
      if (slot.key != EMPTY) slots_[find(slot.key)] = slot;
  }

  void expect(i64) {}
  void prefetch(Word key) const { __builtin_prefetch(&slots_[home(key)]); }

  // Returns the id of a key. A new key gets the id `next`, which then advances. Whether a key is new can't be
  // predicted, so nothing branches on it.
  Word insert(Word key, Word& next) {
    if (4 * (size_ + 1) > 3 * capacity()) reserve(capacity());
    Slot& slot = slots_[find(key)];
    const bool is_new = slot.key == EMPTY;
    const Word id = is_new ? next : slot.id;
    slot = {key, id};
    size_ += is_new;
    next += is_new;
    return id;
  }

  // Returns the id of a key, or EMPTY.
  Word lookup(Word key) const {
    const Slot& slot = slots_[find(key)];
    return slot.key == key ? slot.id : EMPTY;
  }

  // Inserts a key while other threads insert, and keeps the lowest id that was offered. Returns the slot. There has to
  // be room.
  i64 offer(Word key, Word id) {
    i64 at = home(key);
    for (;; at = (at + 1) & mask_) {
      Word found = __atomic_load_n(&slots_[at].key, __ATOMIC_RELAXED);
      if (found == EMPTY && __atomic_compare_exchange_n(&slots_[at].key, &found, key, false, __ATOMIC_RELAXED,
                                                        __ATOMIC_RELAXED))
        break;
      if (found == key) break;
    }
    Word held = __atomic_load_n(&slots_[at].id, __ATOMIC_RELAXED);
    while (id < held && !__atomic_compare_exchange_n(&slots_[at].id, &held, id, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
    }
    return at;
  }

  Word id(i64 slot) const { return __atomic_load_n(&slots_[slot].id, __ATOMIC_RELAXED); }
  void set_id(i64 slot, Word id) { __atomic_store_n(&slots_[slot].id, id, __ATOMIC_RELAXED); }
  void added(i64 number) { size_ += number; }
  i64 size() const { return size_; }

 private:
  i64 capacity() const { return static_cast<i64>(slots_.size()); }
  i64 home(Word key) const { return static_cast<i64>((key * GOLDEN) >> shift_); }

  // Returns the slot of a key, or the empty slot where it belongs.
  i64 find(Word key) const {
    i64 at = home(key);
    while (slots_[at].key != key && slots_[at].key != EMPTY) at = (at + 1) & mask_;
    return at;
  }

  using Slots = std::vector<Slot, HugePages<Slot>>;

  void allocate(Slots& slots, i64 entries) {
    int bits = 6;
    while ((i64(1) << bits) < 2 * entries) ++bits;
    slots.assign(std::size_t(1) << bits, Slot{EMPTY, EMPTY});
    mask_ = (i64(1) << bits) - 1;
    shift_ = 64 - bits;
  }

  Slots slots_, spare_;
  i64 size_ = 0, mask_ = 0;
  int shift_ = 64;
};

// The same as an array with an entry for each node: `base_` plus its local id. An entry below `base_` is of an earlier
// call, so no call has to clear the array.
class Array {
 public:
  static constexpr bool HAS_BATCHES = false;  // whether keys may be of several batches
  using Word = u32;
  static constexpr Word EMPTY = ~Word(0);
  static constexpr i64 MOST_KEYS = i64(1) << 26;  // an array of 256 MiB
  static constexpr Word MOST_IDS = Word(1) << 31;

  void clear(i64 keys, i64) {
    base_ += top_;
    top_ = 0;
    if (keys > static_cast<i64>(ids_.size()) || base_ > MOST_IDS) {
      ids_.assign(std::max<std::size_t>(keys, ids_.size()), 0);
      base_ = 1;
    }
  }
  static i64 limit() { return MOST_IDS - 1; }

  void reserve(i64) {}
  // Says that ids below `top` will be given.
  void expect(i64 top) { top_ = std::max(top_, static_cast<Word>(top)); }
  void prefetch(Word key) const { __builtin_prefetch(&ids_[key], 1); }

  // Returns the id of a key. A new key gets the id `next`, which then advances. An entry below `base_` gives a
  // difference whose top bit is set, since neither `base_` nor an id is above MOST_IDS. So nothing branches here on
  // whether a key is new, which can't be predicted.
  Word insert(Word key, Word& next) {
    const Word held = ids_[key] - base_, is_new = -(held >> 31), id = (next & is_new) | (held & ~is_new);
    ids_[key] = base_ + id;
    next -= is_new;
    return id;
  }
  Word lookup(Word key) const { return ids_[key] < base_ ? EMPTY : ids_[key] - base_; }

  i64 offer(Word key, Word id) {
    Word held = __atomic_load_n(&ids_[key], __ATOMIC_RELAXED);
    while ((held < base_ || base_ + id < held) && !__atomic_compare_exchange_n(&ids_[key], &held, base_ + id, true,
                                                                               __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return key;
  }
  Word id(i64 slot) const { return __atomic_load_n(&ids_[slot], __ATOMIC_RELAXED) - base_; }
  void set_id(i64 slot, Word id) { __atomic_store_n(&ids_[slot], base_ + id, __ATOMIC_RELAXED); }
  void added(i64) {}
  i64 size() const { return 0; }

 private:
  std::vector<Word, HugePages<Word>> ids_;
  Word base_ = 1, top_ = 0;
};

// -- the edges of one node ---------------------------------------------------------------------------------------------

struct Range {
  i64 begin, end;
};

constexpr i64 FEW = 24;       // numbers that are compared with each other in less time than a table takes
constexpr i64 MOST_FEW = 64;  // the bits of a word, and positions that fit into them

// Chooses `count` of the edges of a node, at most MOST_FEW, without replacement (Floyd's algorithm: Bentley and Floyd, A
// sample of brilliance, 1987).
//
// A word has a bit for each position modulo 64. A bit that is not set says that a position was not taken. One that is
// set says that it was, if there are at most 64 positions. Otherwise it is set by chance only, which rarely happens.
void choose_few(Range range, i64 count, Draws draws, i64* out) {
  const i64 population = range.end - range.begin, first = population - count;
  const bool is_sure = population <= MOST_FEW;
  alignas(64) u64 drawn[MOST_FEW];
  u64 taken = 0;
  draws.below_each(first + 1, count, drawn);
  for (i64 n = 0; n < count; ++n) {
    i64 found = static_cast<i64>(drawn[n]);
    bool is_taken = taken >> (found & 63) & 1;
    if (__builtin_expect(is_taken & !is_sure, 0)) {
      i64 k = 0;
      while (k < n && out[k] != range.begin + found) ++k;
      is_taken = k < n;
    }
    found = is_taken ? first + n : found;
    taken |= u64(1) << (found & 63);
    out[n] = range.begin + found;
  }
}

constexpr i64 LANES = 8;  // nodes that draw at once
using Lanes = u64 __attribute__((vector_size(8 * LANES)));

inline Lanes load(const void* data) {
  Lanes found;
  __builtin_memcpy(&found, data, sizeof(found));
  return found;
}

inline bool any(Lanes lanes) {
  u64 found = 0;
  for (i64 k = 0; k < LANES; ++k) found |= lanes[k];
  return found != 0;
}

// The same for LANES nodes at once. Each node chooses `fan_out` edges, at most FEW, or all its edges if it has no more.
// Every node has fewer than 2^32 - FEW edges. Edge n of node k is written to out[n * LANES + k].
inline void choose_in_lanes(Lanes begin, Lanes population, Lanes state, i64 fan_out, u64* out) {
  const Lanes is_all = (Lanes)(population <= static_cast<u64>(fan_out));
  const Lanes is_sure = (Lanes)(population <= static_cast<u64>(MOST_FEW));
  const Lanes first = (population - static_cast<u64>(fan_out)) & ~is_all;
  Lanes taken = {};
  for (i64 n = 0; n < fan_out; ++n) {
    state += GOLDEN;
    const Lanes z = mix(state), last = first + static_cast<u64>(n), most = last + 1;
    const Lanes found = ((z >> 32) * most + ((z & 0xffffffff) * most >> 32)) >> 32;
    Lanes is_taken = -(taken >> (found & 63) & 1);
    if (__builtin_expect(any(is_taken & ~is_sure), 0)) {
      Lanes is_same = {};
      for (i64 m = 0; m < n; ++m) is_same |= (Lanes)(load(out + m * LANES) == begin + found);
      is_taken &= is_same | is_sure;
    }
    const Lanes is_last = is_taken | is_all, chosen = (found & ~is_last) | (last & is_last);
    taken |= (Lanes{} + 1) << (chosen & 63);
    const Lanes edge = begin + chosen;
    __builtin_memcpy(out + n * LANES, &edge, sizeof(edge));
  }
}

// The same for any count.
void choose(Range range, i64 count, Draws draws, i64* out) {
  const i64 population = range.end - range.begin;
  if (count <= FEW || population <= MOST_FEW) return choose_few(range, count, draws, out);
  static thread_local HashTable<u64> taken;
  taken.clear(population, count);
  for (i64 i = population - count; i < population; ++i) {
    const i64 before = taken.size();
    i64 found = draws.below(i + 1);
    u64 none = 0;
    taken.insert(found, none);
    if (taken.size() == before) taken.insert(found = i, none);
    *out++ = range.begin + found;
  }
}

// Chooses edges without replacement, by weight: the largest keys log(u) / weight (Efraimidis and Spirakis, Weighted
// random sampling with a reservoir, 2006). Edges of weight 0 come last.
Status choose_by_weight(const Relation& relation, Range range, i64 count, Draws draws, i64* out, i64& bad) {
  static thread_local std::vector<std::pair<double, i64>> keys;
  keys.clear();
  for (i64 edge = range.begin; edge < range.end; ++edge) {
    const double weight = relation.weight_of(edge);
    if (!(weight >= 0 && weight <= std::numeric_limits<double>::max())) {
      bad = edge;
      return BAD_WEIGHT;
    }
    const double u = draws.uniform();
    keys.emplace_back(weight > 0 ? std::log(u) / weight : -std::numeric_limits<double>::infinity(), edge);
  }
  const auto is_before = [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  };
  std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), is_before);
  for (i64 n = 0; n < count; ++n) out[n] = keys[n].second;
  return OK;
}

// Draws edges with replacement, by weight: a binary search in the running sum.
Status draw_by_weight(const Relation& relation, Range range, i64 count, Draws draws, i64* out, i64& bad) {
  static thread_local std::vector<double> sums;
  sums.clear();
  double sum = 0;
  i64 last = -1;
  for (i64 edge = range.begin; edge < range.end; ++edge) {
    const double weight = relation.weight_of(edge);
    if (!(weight >= 0 && weight <= std::numeric_limits<double>::max())) {
      bad = edge;
      return BAD_WEIGHT;
    }
    if (weight > 0) last = edge;
    sums.push_back(sum += weight);
  }
  if (last < 0) return NO_WEIGHT;
  for (i64 n = 0; n < count; ++n) {
    const i64 found = std::upper_bound(sums.begin(), sums.end(), draws.uniform() * sum) - sums.begin();
    out[n] = std::min(range.begin + found, last);  // rounding may reach the sum
  }
  return OK;
}

// -- the whole ---------------------------------------------------------------------------------------------------------

constexpr i64 AHEAD = 16;          // edges between a prefetch and its use
constexpr i64 FAR = 64;            // nodes between a prefetch of colptr and its use
constexpr i64 BLOCK = 64;          // nodes that one thread takes at once
constexpr i64 STEP = 16;           // nodes whose edges are drawn before their sources are read
constexpr i64 KEPT = 64 * STEP;    // the most edges of a step that are kept in a buffer
constexpr i64 STREAMED = 1 << 16;  // edges from which a hop is written past the caches: they would fill one
constexpr i64 SEVERAL = 1 << 13;   // edges from which threads share the work on local ids
constexpr i64 ENOUGH = 3;          // threads from which they do: two would take longer than one

#ifdef __SSE2__
constexpr bool CAN_STREAM = true;

// A line of the cache, to an address that is a multiple of 64.
inline void stream_line(const i64* from, i64* to) {
#ifdef __AVX512F__
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  for (i64 k = 0; k < 8; k += 2)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
#endif
}

// Copies numbers to memory past the caches, which then keep the graph.
inline void stream(const i64* from, i64 number, i64* to) {
  i64 n = 0;
  for (; n < number && reinterpret_cast<std::uintptr_t>(to + n) % 64; ++n) to[n] = from[n];
  for (; n + 8 <= number; n += 8) stream_line(from + n, to + n);
  std::copy(from + n, from + number, to + n);
}

// Other threads see the numbers from now on.
inline void finish_stream() { _mm_sfence(); }
#else
constexpr bool CAN_STREAM = false;

inline void stream(const i64* from, i64 number, i64* to) { std::copy(from, from + number, to); }
inline void finish_stream() {}
#endif

template <typename Table>
class Sampler {
 public:
  using Word = typename Table::Word;
  Sampler(const Request& request, Answer& answer) : request_(request), answer_(answer), scratch_(scratch()) {
    tables_.resize(std::max(tables_.size(), static_cast<std::size_t>(request.num_types)));
    slices_.resize(request.num_types);
  }

  Status run() {
    for (i64 type = 0; type < request_.num_types; ++type) add_seeds(type);
    for (i64 hop = 0; hop < request_.num_hops && status_ == OK; ++hop) {
      for (i64 k = 0; k < request_.num_relations && status_ == OK; ++k) sample(k, hop);
      for (i64 type = 0; type < request_.num_types; ++type) {
        slices_[type] = {slices_[type].end, answer_.node[type].size};
        answer_.nodes_per_hop[type * (request_.num_hops + 1) + hop + 1] = slices_[type].end - slices_[type].begin;
      }
    }
    if (request_.induced)
      for (i64 k = 0; k < request_.num_relations && status_ == OK; ++k) induce(k);
    return status_;
  }

 private:
  Word key(i64 type, i64 node, i64 batch) const { return static_cast<Word>(batch * request_.num_nodes[type] + node); }
  bool is_source(const Relation& relation, i64 node) const {
    return node >= 0 && node < request_.num_nodes[relation.source];
  }
  i64 batch_of(i64 type, i64 local) const { return request_.disjoint ? answer_.batch[type].data[local] : 0; }

  void fail(Status status, i64 relation, i64 position) {
    i64 none = OK;
    if (failing_.compare_exchange_strong(none, status)) {
      answer_.relation = relation;
      answer_.position = position;
    }
  }

  // Seeds that occur twice stay two nodes, since PyG reads the first rows as those of the seeds. Edges lead from the
  // first of the two.
  void add_seeds(i64 type) {
    const i64 number = request_.num_seeds[type];
    tables_[type].clear(request_.num_nodes[type], 4 * number);
    tables_[type].expect(number);
    i64* node = answer_.node[type].extend(number);
    i64* batch = request_.disjoint ? answer_.batch[type].extend(number) : nullptr;
    for (i64 i = 0; i < number; ++i) {
      node[i] = request_.seeds[type][i];
      const i64 in_batch = batch ? request_.first_batch[type] + i : 0;
      if (batch) batch[i] = in_batch;
      Word next = static_cast<Word>(i);
      tables_[type].insert(key(type, node[i], in_batch), next);
    }
    slices_[type] = {0, number};
    answer_.nodes_per_hop[type * (request_.num_hops + 1)] = number;
  }

  // The edges of a node that may be sampled, since they are not later than the seed.
  Range range_until(i64 k, i64 node, i64 batch, i64 fan_out) {
    const Relation& relation = request_.relations[k];
    Range range = {relation.colptr[node], relation.colptr[node + 1]};
    if (fan_out == 0 || range.begin == range.end) return range;
    const auto time = [&](i64 edge) {
      if (relation.edge_time) return relation.edge_time[edge];
      const i64 from = relation.row[edge];
      if (is_source(relation, from)) return relation.node_time[from];
      fail(ROW_OUT_OF_RANGE, k, edge);
      return i64(0);
    };
    // The first edge after the seed's time.
    const i64 latest = request_.seed_times[batch];
    i64 low = range.begin, high = range.end;
    while (low < high) {
      const i64 middle = low + (high - low) / 2;
      if (time(middle) <= latest)
        low = middle + 1;
      else
        high = middle;
    }
    range.end = low;
    if (request_.last && fan_out > 0) range.begin = std::max(range.begin, range.end - fan_out);
    if (range.begin < range.end && time(range.begin) > time(range.end - 1)) fail(TIMES_NOT_SORTED, k, node);
    return range;
  }

  i64 number_of(Range range, i64 fan_out) const {
    const i64 population = range.end - range.begin;
    if (fan_out < 0 || population == 0) return population;
    return request_.replace ? fan_out : std::min(fan_out, population);
  }

  void draw(i64 k, Range range, i64 number, bool is_all, Draws draws, i64* out) {
    const Relation& relation = request_.relations[k];
    const i64 population = range.end - range.begin;
    if (is_all || (!request_.replace && number == population)) {
      for (i64 n = 0; n < number; ++n) out[n] = range.begin + n;
    } else if (relation.weight) {
      i64 bad = range.begin;
      const Status status = request_.replace ? draw_by_weight(relation, range, number, draws, out, bad)
                                             : choose_by_weight(relation, range, number, draws, out, bad);
      if (status != OK) {
        fail(status, k, bad);
        std::fill(out, out + number, range.begin);
      }
    } else if (request_.replace) {
      for (i64 n = 0; n < number; ++n) out[n] = range.begin + draws.below(population);
    } else {
      choose(range, number, draws, out);
    }
  }

  // Samples the edges of one relation to the nodes that the hop before has found.
  void sample(i64 k, i64 hop) {
    const Relation& relation = request_.relations[k];
    const i64 fan_out = relation.fan_outs[hop], first = slices_[relation.target].begin;
    const i64 number = slices_[relation.target].end - first;
    const i64* node = answer_.node[relation.target].data + first;
    begins_.resize(number);
    populations_.resize(number);
    starts_.resize(number + 1);
    i64 *const begins = begins_.data(), *const populations = populations_.data(), *const starts = starts_.data();
    const bool has_times = relation.node_time || relation.edge_time;
#pragma omp parallel for num_threads(request_.threads) if (number > BLOCK) schedule(static)
    for (i64 i = 0; i < number; ++i) {
      if (i + FAR < number) relation.colptr.prefetch(node[i + FAR]);
      const Range range = has_times ? range_until(k, node[i], batch_of(relation.target, first + i), fan_out)
                                    : Range{relation.colptr[node[i]], relation.colptr[node[i] + 1]};
      begins[i] = range.begin;
      populations[i] = range.end - range.begin;
      starts[i + 1] = number_of(range, fan_out);
    }
    starts_[0] = 0;
    for (i64 i = 0; i < number; ++i) starts_[i + 1] += starts_[i];
    status_ = static_cast<Status>(failing_.load());
    const i64 total = starts_[number];
    answer_.edges_per_hop[k * request_.num_hops + hop] = total;
    if (status_ != OK || total == 0) return;

    const i64 source = relation.source, before = answer_.node[source].size;
    if (before + total >= Table::limit()) {
      status_ = TOO_LARGE;
      return;
    }
    tables_[source].expect(before + total);
    const u64 stream = mix(request_.seed ^ mix(GOLDEN * (hop * request_.num_relations + k + 1)));
    Hop found = {k, source, fan_out, first, number, stream};
    found.row = answer_.row[k].extend(total);
    found.col = answer_.col[k].extend(total);
    found.edge = answer_.edge[k].extend(total);
    found.node = answer_.node[source].extend(total);
    found.batch = request_.disjoint ? answer_.batch[source].extend(total) : nullptr;
    // After `extend`, which may move it.
    found.batches = request_.disjoint ? answer_.batch[relation.target].data : nullptr;
    const i64 added = request_.threads > 1 ? find_together(found, before, total) : find(found, before, total);
    status_ = static_cast<Status>(failing_.load());
    answer_.node[source].size = before + added;
    if (found.batch) answer_.batch[source].size = before + added;
    if (request_.induced) answer_.row[k].size = answer_.col[k].size = answer_.edge[k].size = 0;
  }

  // The edges of one relation and one hop, while they are sampled.
  struct Hop {
    i64 relation, source;   // the relation, and the node type of sources
    i64 fan_out;            // the most edges of a node, or negative for all
    i64 first, number;      // the nodes that the edges lead to
    u64 stream;             // of random numbers
    i64 *row, *col, *edge;  // [num_edges]
    i64 *node, *batch;      // room for the nodes that are new; `batch` is null without batches
    const i64* batches;     // the batch of each node that edges lead to, or null
  };

  // Edges of a hop: all, or those from some edge on.
  struct Edges {
    i64 *row, *col, *edge;

    Edges operator+(i64 by) const { return {row + by, col + by, edge + by}; }
  };
  static Edges all_of(const Hop& hop) { return {hop.row, hop.col, hop.edge}; }

  Word key_of(const Hop& hop, const Edges& edges, i64 e) const {
    if (!Table::HAS_BATCHES || !hop.batches) return static_cast<Word>(edges.row[e]);
    return key(hop.source, edges.row[e], hop.batches[edges.col[e]]);
  }

  // Draws the edges to the nodes `begin` to `end - 1` of a hop, and prefetches their sources.
  void draw_edges(const Hop& hop, i64 begin, i64 end, const Edges& out) {
    const Relation& relation = request_.relations[hop.relation];
    const bool is_uniform = hop.fan_out >= 0 && !relation.weight && !request_.replace;
    i64 i = begin;
    if (is_uniform && hop.fan_out <= FEW && relation.num_edges < (i64(1) << 32) - FEW)
      for (; i + LANES <= end; i += LANES) draw_in_lanes(hop, i, out + (starts_[i] - starts_[begin]));
    for (; i < end; ++i) draw_one(hop, i, out + (starts_[i] - starts_[begin]));
  }

  // The same for one node.
  void draw_one(const Hop& hop, i64 i, const Edges& out) {
    const i64 drawn = starts_[i + 1] - starts_[i];
    const Range range = {begins_[i], begins_[i] + populations_[i]};
    std::fill(out.col, out.col + drawn, hop.first + i);
    draw(hop.relation, range, drawn, hop.fan_out < 0, Draws{mix(hop.stream + GOLDEN * (hop.first + i))}, out.edge);
    for (i64 n = 0; n < drawn; ++n) request_.relations[hop.relation].row.prefetch(out.edge[n]);
  }

  // The same for LANES nodes, uniformly and without replacement.
  void draw_in_lanes(const Hop& hop, i64 i, Edges out) {
    constexpr Lanes STRIDES = {0, GOLDEN, 2 * GOLDEN, 3 * GOLDEN, 4 * GOLDEN, 5 * GOLDEN, 6 * GOLDEN, 7 * GOLDEN};
    const Ints row = request_.relations[hop.relation].row;
    alignas(64) u64 drawn[FEW * LANES];
    const Lanes state = mix(hop.stream + GOLDEN * (hop.first + i) + STRIDES);
    choose_in_lanes(load(&begins_[i]), load(&populations_[i]), state, hop.fan_out, drawn);
    i64 at = 0;
    for (i64 k = 0; k < LANES; ++k) {
      const i64 number = starts_[i + k + 1] - starts_[i + k];
      for (i64 n = 0; n < number; ++n, ++at) {
        out.edge[at] = drawn[n * LANES + k];
        out.col[at] = hop.first + i + k;
        row.prefetch(out.edge[at]);
      }
    }
  }

  // Reads the sources of the edges. Returns false if one does not exist. `look` is called with each edge.
  template <typename Look>
  bool read_sources(const Hop& hop, const Edges& edges, i64 number, Look look) {
    const Relation& relation = request_.relations[hop.relation];
    const void* row = relation.row.data;
    const bool is_right = relation.row.is_wide
                              ? read_all(static_cast<const i64*>(row), relation.source, edges, number, look)
                              : read_all(static_cast<const std::int32_t*>(row), relation.source, edges, number, look);
    for (i64 n = 0; !is_right && n < number; ++n)
      if (!is_source(relation, edges.row[n])) {
        fail(ROW_OUT_OF_RANGE, hop.relation, edges.edge[n]);
        break;
      }
    return is_right;
  }

  // The same for rows of one type, without a message.
  template <typename Int, typename Look>
  bool read_all(const Int* row, i64 source, Edges edges, i64 number, Look look) const {
    const u64 limit = static_cast<u64>(request_.num_nodes[source]);
    bool is_right = true;
    for (i64 n = 0; n < number; ++n) {
      edges.row[n] = row[edges.edge[n]];
      is_right &= static_cast<u64>(edges.row[n]) < limit;
      look(n);
    }
    return is_right;
  }

  // Replaces the sources of edges by local ids, and appends the nodes that are new in the order of the edges. Returns
  // the number of nodes that are new in the hop so far.
  i64 relabel(const Hop& hop, Edges edges, i64 number, i64 before, i64 added) {
    Table& table = tables_[hop.source];
    i64* const batch = Table::HAS_BATCHES ? hop.batch : nullptr;
    Word next = static_cast<Word>(before + added);
    for (i64 e = 0; e < number; ++e) {
      const i64 at = static_cast<i64>(next) - before;
      hop.node[at] = edges.row[e];  // overwritten by the next edge unless the node is new
      if (batch) batch[at] = hop.batches[edges.col[e]];
      edges.row[e] = static_cast<i64>(table.insert(key_of(hop, edges, e), next));
    }
    return static_cast<i64>(next) - before;
  }

  // Finds the edges and nodes of a hop, by one thread. Rows and entries of the table are prefetched one step before
  // they are read, so memory is busy while edges are drawn. The edges of a large hop stay in buffers until they are
  // done. Then they are written past the caches.
  i64 find(const Hop& hop, i64 before, i64 total) {
    Table& table = tables_[hop.source];
    table.reserve(table.size() + total / 2);
    const bool is_streamed = CAN_STREAM && total >= STREAMED;
    const i64 steps = (hop.number + STEP - 1) / STEP;
    const auto start_of = [&](i64 step) { return starts_[std::min(hop.number, step * STEP)]; };
    const auto edges_of = [&](i64 step) {
      i64* room = scratch_.room[step % 3];
      const bool is_kept = is_streamed && start_of(step + 1) - start_of(step) <= KEPT;
      return is_kept ? Edges{room, room + KEPT, room + 2 * KEPT} : all_of(hop) + start_of(step);
    };
    i64 added = 0;
    for (i64 step = 0; step < steps + 2; ++step) {
      if (step < steps) draw_edges(hop, step * STEP, std::min(hop.number, (step + 1) * STEP), edges_of(step));
      if (step > 0 && step <= steps) {
        const Edges edges = edges_of(step - 1);
        const i64 number = start_of(step) - start_of(step - 1);
        if (!read_sources(hop, edges, number, [&](i64 e) { table.prefetch(key_of(hop, edges, e)); })) break;
      }
      if (step > 1) {
        const i64 start = start_of(step - 2), number = start_of(step - 1) - start;
        added = relabel(hop, edges_of(step - 2), number, before, added);
        if (edges_of(step - 2).row != hop.row + start) stream_edges(edges_of(step - 2), number, all_of(hop) + start);
      }
    }
    finish_stream();
    return added;
  }

  static void stream_edges(const Edges& edges, i64 number, const Edges& to) {
    stream(edges.row, number, to.row);
    stream(edges.col, number, to.col);
    stream(edges.edge, number, to.edge);
  }

  // The same by several threads, each of which takes some of the nodes.
  i64 find_together(const Hop& hop, i64 before, i64 total) {
    const i64 blocks = (hop.number + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(request_.threads) if (blocks > 1) schedule(dynamic)
    for (i64 block = 0; block < blocks; ++block) {
      try {
        const i64 begin = block * BLOCK, end = std::min(hop.number, begin + BLOCK);
        const Edges edges = all_of(hop) + starts_[begin];
        draw_edges(hop, begin, end, edges);
        read_sources(hop, edges, starts_[end] - starts_[begin], [](i64) {});
      } catch (const std::bad_alloc&) {
        fail(NO_MEMORY, hop.relation, 0);
      }
    }
    if (failing_.load() != OK) return 0;
    if (request_.threads >= ENOUGH && total >= SEVERAL) return relabel_together(hop, before, total);
    Table& table = tables_[hop.source];
    table.reserve(table.size() + total / 2);
    i64 added = 0;
    for (i64 e = 0; e < total; e += AHEAD) {
      const i64 end = std::min(total, e + AHEAD);
      for (i64 next = end; next < std::min(total, end + AHEAD); ++next) table.prefetch(key_of(hop, all_of(hop), next));
      added = relabel(hop, all_of(hop) + e, end - e, before, added);
    }
    return added;
  }

  // The same by several threads. Each edge offers its own position as the id of its node, and the lowest is kept. Then
  // the edges whose offer was kept are counted, which gives the ids.
  i64 relabel_together(const Hop& hop, i64 before, i64 total) {
    Table& table = tables_[hop.source];
    table.reserve(std::min(table.size() + total, request_.num_batches * request_.num_nodes[hop.source]));
    const i64 threads = request_.threads, share = (total + threads - 1) / threads;
    slots_.resize(total);
    firsts_.assign(threads + 1, 0);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (i64 thread = 0; thread < threads; ++thread) {
      const i64 end = std::min(total, (thread + 1) * share);
      for (i64 e = thread * share; e < end; ++e) {
        if (e + AHEAD < end) table.prefetch(key_of(hop, all_of(hop), e + AHEAD));
        slots_[e] = table.offer(key_of(hop, all_of(hop), e), static_cast<Word>(before + e));
      }
    }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (i64 thread = 0; thread < threads; ++thread) {
      const i64 end = std::min(total, (thread + 1) * share);
      i64 found = 0;
      for (i64 e = thread * share; e < end; ++e) found += table.id(slots_[e]) == static_cast<Word>(before + e);
      firsts_[thread + 1] = found;
    }
    for (i64 thread = 0; thread < threads; ++thread) firsts_[thread + 1] += firsts_[thread];
    // An id is at most the offer that it replaces, so no other edge's offer equals it.
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (i64 thread = 0; thread < threads; ++thread) {
      const i64 end = std::min(total, (thread + 1) * share);
      i64 next = firsts_[thread];
      for (i64 e = thread * share; e < end; ++e) {
        if (table.id(slots_[e]) != static_cast<Word>(before + e)) continue;
        hop.node[next] = hop.row[e];
        if (hop.batch) hop.batch[next] = hop.batches[hop.col[e]];
        table.set_id(slots_[e], static_cast<Word>(before + next++));
      }
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 e = 0; e < total; ++e) hop.row[e] = table.id(slots_[e]);
    table.added(firsts_[threads]);
    return firsts_[threads];
  }

  // Takes all edges of one relation between nodes that were sampled.
  void induce(i64 k) {
    const Relation& relation = request_.relations[k];
    const Table& table = tables_[relation.source];
    const i64 number = answer_.node[relation.target].size;
    const i64* node = answer_.node[relation.target].data;
    const auto each = [&](i64 i, auto&& take) {
      for (i64 edge = relation.colptr[node[i]]; edge < relation.colptr[node[i] + 1]; ++edge) {
        const i64 from = relation.row[edge];
        if (!is_source(relation, from)) {
          fail(ROW_OUT_OF_RANGE, k, edge);
          continue;
        }
        const Word id = table.lookup(static_cast<Word>(from));
        if (id != Table::EMPTY) take(static_cast<i64>(id), edge);
      }
    };
    starts_.resize(number + 1);
#pragma omp parallel for num_threads(request_.threads) if (number > BLOCK) schedule(dynamic, BLOCK)
    for (i64 i = 0; i < number; ++i) {
      i64 found = 0;
      each(i, [&](i64, i64) { ++found; });
      starts_[i + 1] = found;
    }
    starts_[0] = 0;
    for (i64 i = 0; i < number; ++i) starts_[i + 1] += starts_[i];
    status_ = static_cast<Status>(failing_.load());
    if (status_ != OK) return;
    const i64 total = starts_[number];
    i64 *row = answer_.row[k].extend(total), *col = answer_.col[k].extend(total), *edge = answer_.edge[k].extend(total);
#pragma omp parallel for num_threads(request_.threads) if (number > BLOCK) schedule(dynamic, BLOCK)
    for (i64 i = 0; i < number; ++i) {
      i64 at = starts_[i];
      each(i, [&](i64 id, i64 which) {
        row[at] = id;
        col[at] = i;
        edge[at++] = which;
      });
    }
  }

  const Request& request_;
  Answer& answer_;
  Status status_ = OK;
  std::atomic<i64> failing_{OK};
  std::vector<Range> slices_;  // per type: the nodes that the hop before has found

  // Kept between the calls of a thread: new memory would cost a page fault per 4 KiB in each.
  struct Scratch {
    i64 room[3][3 * KEPT];  // the edges of three steps
    std::vector<Table> tables;
    std::vector<i64> begins, populations, starts, slots, firsts;
  };
  static Scratch& scratch() {
    static thread_local Scratch kept;
    return kept;
  }
  // References, since a name of thread_local memory would mean other memory in each thread of a loop.
  Scratch& scratch_;
  std::vector<Table>& tables_ = scratch_.tables;
  std::vector<i64>&begins_ = scratch_.begins, &populations_ = scratch_.populations;
  std::vector<i64>&starts_ = scratch_.starts, &slots_ = scratch_.slots, &firsts_ = scratch_.firsts;
};

}  // namespace

extern "C" i64 sample_neighborhood(const Request* request, Answer* answer) {
  try {
    i64 most = 0;
    for (i64 type = 0; type < request->num_types; ++type) most = std::max(most, request->num_nodes[type]);
    const bool is_narrow = most < std::numeric_limits<u32>::max() / std::max<i64>(request->num_batches, 1);
    if (!request->disjoint && most <= Array::MOST_KEYS) return Sampler<Array>(*request, *answer).run();
    return is_narrow ? Sampler<HashTable<u32>>(*request, *answer).run()
                     : Sampler<HashTable<u64>>(*request, *answer).run();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" void release(void* data) { std::free(data); }
