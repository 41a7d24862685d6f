// Keys and values in a pool of pages: maps the keys of a sequence to rows of the pool.
#pragma once

#include <memeff/core/common.cuh>

namespace memeff {

// The pool has pages * kPageSize rows. Small pages have 1, 2, 4 or 8 of them, and others a multiple
// of 16. kPageStep rows that begin at a multiple of kPageStep lie in one page.
template <class Config>
constexpr bool kSmallPages = Config::kPageSize > 0 && Config::kPageSize < 16;
template <class Config>
constexpr int kPageStep = kSmallPages<Config> ? Config::kPageSize : 16;

// The scale of a pool of float8: none, one for each key head, or one for each page and key head.
enum class PoolScale { none, heads, pages };

// The scales of a pool for one key head.
struct PoolScales {
  float const* first;
  long long page_stride;

  // `array` is the index of the scales among the arrays of features.
  CUTE_DEVICE PoolScales(ForwardParams const& params, int array, int key_head) {
    ArrayView const& scales = feature_array(params, array);
    first = static_cast<float const*>(scales.data) + key_head * scales.strides[2];
    page_stride = scales.strides[1];
  }
};

// Whether keys and values before a window may be NaN, because their pages may be freed. In calls
// without pages they must be finite.
template <class Config>
constexpr bool kMayBeFreed = Config::kPageSize > 0 && Config::kMask == MaskKind::window;

// The first key of a work tile's first row: no row of the tile needs the keys before it.
template <class Config, bool kOn = kMayBeFreed<Config>>
struct FirstKey {
  static constexpr bool kFirstKey = false;

  CUTE_DEVICE explicit FirstKey(int) {}
};

template <class Config>
struct FirstKey<Config, true> {
  static constexpr bool kFirstKey = true;

  int first_key;

  CUTE_DEVICE explicit FirstKey(int first_key) : first_key(first_key) {}
  CUTE_DEVICE bool needs(int key) const { return key >= first_key; }
};

// The page table of a sequence. Calls without pages have an empty one.
template <class Config, bool kOn = (Config::kPageSize > 0)>
struct PageTable {
  static constexpr bool kPaged = false;

  template <class Params>
  CUTE_DEVICE PageTable(Params const&, int, int = 0) {}
};

template <class Config>
struct PageTable<Config, true> : FirstKey<Config> {
  static constexpr bool kPaged = true;
  static constexpr bool kEndsAtLength = true;  // row() must not be called for keys beyond it
  static constexpr int kPageSize = Config::kPageSize;
  static constexpr int kStep = kPageStep<Config>;
  static_assert(kPageSize % kStep == 0 && 16 % kStep == 0);

  int const* entries;  // the row of the table for the sequence
  int pages;           // the number of pages of the pool

  // `first_key`: see FirstKey.
  template <class Params>
  CUTE_DEVICE PageTable(Params const& params, int batch, int first_key = 0)
      : FirstKey<Config>(first_key), pages(params.shape.key_tokens / kPageSize) {
    ArrayView const& table = feature_array(params, Config::kPageTableArray);
    entries = static_cast<int const*>(table.data) + batch * table.sizes[1];
  }

  // Hazard: never call it for keys beyond the length of the sequence, because the table may end
  // there. Returns the row of the pool for a key, or -1 if its page is outside the pool.
  CUTE_DEVICE int row(int key) const {
    int const page = entry(key);
    return unsigned(page) < unsigned(pages) ? page * kPageSize + int(unsigned(key) % kPageSize)
                                            : -1;
  }

  // The entry for a key, and its row if it has this entry.
  CUTE_DEVICE int entry(int key) const { return __ldg(entries + unsigned(key) / kPageSize); }
  CUTE_DEVICE int row_of(int page, int key) const {
    return unsigned(page) < unsigned(pages) ? page * kPageSize + int(unsigned(key) % kPageSize)
                                            : -1;
  }
};

// The page table of a sequence for a warp that copies its keys by cp.async: kKeys of each KV block,
// one block after the other. The lanes hold a window of entries, and the next window is loaded
// ahead.
//
// Hazard: L1 returns loads in order. An entry that is loaded after copies have started arrives
// after them, so a main loop that loads an entry for each KV block waits for its newest copies.
template <class Config, int kKeys, bool kOn = (Config::kPageSize > 0),
          bool kSmall = kSmallPages<Config>>
struct PageWindow : PageTable<Config> {
  CUTE_DEVICE PageWindow(PageTable<Config> const& table, int) : PageTable<Config>(table) {}

  CUTE_DEVICE void seek(int) {}
  CUTE_DEVICE bool may_miss() const { return false; }
};

// A window of 32 pages. The keys of a KV block lie in one window.
template <class Config, int kKeys>
class PageWindow<Config, kKeys, true, false> {
 public:
  static constexpr bool kPaged = true;
  static constexpr bool kEndsAtLength = true;
  static constexpr int kPageSize = Config::kPageSize;
  static constexpr int kStep = kPageStep<Config>;
  static constexpr bool kFirstKey = PageTable<Config>::kFirstKey;
  static_assert(kKeys <= kWarpSize * kStep);

  // `length` is the number of keys of the sequence.
  CUTE_DEVICE PageWindow(PageTable<Config> const& table, int length)
      : table_(table), last_((max(length, 1) - 1) / kPageSize) {}

  // Moves to the window with the keys from this one on, the same in all lanes. Every lane of the
  // warp calls it.
  CUTE_DEVICE void seek(int key) {
    int const first = min(unsigned(key) / kPageSize, unsigned(last_)) / kWarpSize * kWarpSize;
    if (first == first_) return;
    current_ = first == first_ + kWarpSize ? next_ : load(first);
    next_ = load(first + kWarpSize);
    first_ = first;
    may_miss_ |= __any_sync(0xffffffffu, unsigned(current_) >= unsigned(table_.pages));
  }

  // The row of the pool for a key of the window, or -1 if its page is outside the pool. Every lane
  // calls it, each for a key of its own.
  CUTE_DEVICE int row(int key) const {
    int const page = __shfl_sync(0xffffffffu, current_, int(unsigned(key) / kPageSize) - first_);
    return unsigned(page) < unsigned(table_.pages)
               ? page * kPageSize + int(unsigned(key) % kPageSize)
               : -1;
  }

  // See FirstKey.
  CUTE_DEVICE bool needs(int key) const { return table_.needs(key); }

  // Whether a window so far had an invalid entry.
  CUTE_DEVICE bool may_miss() const { return may_miss_; }

 private:
  // Hazard: the table may end at the last page of the sequence.
  CUTE_DEVICE int load(int first) const {
    return __ldg(table_.entries + min(first + int(threadIdx.x) % kWarpSize, last_));
  }

  PageTable<Config> table_;
  int last_;  // page of the sequence
  int first_ = -2 * kWarpSize;
  int current_ = 0;  // the entry of this lane
  int next_ = 0;
  bool may_miss_ = false;
};

// A window of small pages: those of kKeys in each of kBlocks KV blocks. By the time the next window
// is used, the main loop has waited for the copies that were in flight when it was loaded.
template <class Config, int kKeys>
class PageWindow<Config, kKeys, true, true> {
 public:
  static constexpr bool kPaged = true;
  static constexpr bool kEndsAtLength = false;
  static constexpr int kPageSize = Config::kPageSize;
  static constexpr int kStep = kPageStep<Config>;
  static constexpr bool kFirstKey = PageTable<Config>::kFirstKey;

  CUTE_DEVICE PageWindow(PageTable<Config> const& table, int length)
      : table_(table), last_((max(length, 1) - 1) / kPageSize) {}

  CUTE_DEVICE void seek(int key) {
    int const block = int(unsigned(key) / Config::kTileKey);
    int const first = block / kBlocks * kBlocks;
    if (first != first_) {
      int const first_key = key - (block - first) * Config::kTileKey;
      bool missing = false;
      CUTE_UNROLL
      for (int i = 0; i < kEntries; ++i) {
        int const page = first == first_ + kBlocks ? next_[i] : load(first_key, i);
        next_[i] = load(first_key + kBlocks * Config::kTileKey, i);
        bool const exists = unsigned(page) < unsigned(table_.pages);
        current_[i] = exists ? page * kPageSize : kMissing;
        missing = missing || !exists;
      }
      first_ = first;
      may_miss_ |= __any_sync(0xffffffffu, missing);
    }
    key_ = key;
    place_ = (block - first) * kPages;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      own_[i] = current_[i];
      CUTE_UNROLL
      for (int j = i + kOwn; j < kEntries; j += kOwn) {
        if (place_ / kWarpSize == j - i) own_[i] = current_[j];
      }
    }
  }

  // The row of the pool for one of the kKeys keys of the KV block, or a negative number. The key
  // may be beyond the length.
  CUTE_DEVICE int row(int key) const {
    unsigned const page_of_block = unsigned(key - key_) / kPageSize;
    int first = shuffled(own_[0], page_of_block);
    CUTE_UNROLL
    for (int i = 1; i < kOwn; ++i) {
      int const other = shuffled(own_[i], page_of_block);
      if (page_of_block / kWarpSize == i) first = other;
    }
    return first + int(unsigned(key) % kPageSize);
  }

  CUTE_DEVICE bool needs(int key) const { return table_.needs(key); }
  CUTE_DEVICE bool may_miss() const { return may_miss_; }

 private:
  static constexpr int kPages = kKeys / kPageSize;
  static constexpr int kCopied = Config::kStages > 3 ? 4 : 2;  // KV blocks that are ahead, or more
  static_assert(kKeys % kPageSize == 0 && is_power_of_two(kPages) &&
                Config::kStages - 1 <= kCopied);
  static constexpr int kBlocks = kCopied * kPages > kWarpSize ? kCopied : kWarpSize / kPages;
  static constexpr int kEntries = kBlocks * kPages / kWarpSize;  // of a lane
  static constexpr int kOwn = ceil_div(kPages, kWarpSize);       // of a lane, of one KV block
  static constexpr int kMissing = -kPageSize;                    // all rows of such a page are < 0

  CUTE_DEVICE int shuffled(int entry, unsigned page_of_block) const {
    return __shfl_sync(0xffffffffu, entry, int((place_ + page_of_block) % kWarpSize));
  }

  // The lane's entry `i` of the window whose first KV block begins at `first_key`.
  CUTE_DEVICE int load(int first_key, int i) const {
    int const place = i * kWarpSize + int(threadIdx.x) % kWarpSize;
    int const key = first_key + place / kPages * Config::kTileKey;
    return __ldg(table_.entries + min(key / kPageSize + place % kPages, last_));
  }

  PageTable<Config> table_;
  int last_;
  int first_ = -2 * kBlocks;  // KV block of the window
  int current_[kEntries];     // the first rows of pages
  int next_[kEntries];        // entries of the table
  int own_[kOwn];             // those of current_ in the KV block
  int key_ = 0;               // the first of the KV block
  int place_ = 0;             // in the window
  bool may_miss_ = false;
};

}  // namespace memeff
