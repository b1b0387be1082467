// Rows of scores and of results, shared by the top-k kernels. PAGED: results are physical rows.
#pragma once
#include "common.cuh"

// The columns of a row that are searched; column 0 is where they start.
struct Row {
  const float* scores;
  u32 length;
  const int* table;  // pages of the row's request
  u32 page_shift;

  DEVICE int page_of(int column) const { return table[max(column, 0) >> page_shift]; }
  DEVICE int row_of(int column, int page) const {
    const int row = (page << page_shift) + (column & ((1 << page_shift) - 1));
    return min(column, page) < 0 ? -1 : row;
  }

  // PAGED: the physical row of a column's key, -1 on a missing page.
  DEVICE int report(int column) const {
#if PAGED
    return column < 0 ? -1 : row_of(column, page_of(column));
#else
    return column;
#endif
  }

  // k / 4 int4 of columns, -1 for none, from shared memory. The row is not empty: its table has a
  // first page, which is read for no column, so that all loads of a thread are under way at once.
  DEVICE void write(const u32* columns, int* out, u32 k) const {
    for (u32 i = threadIdx.x; i < k / 4; i += THREADS) {
      int4 four = reinterpret_cast<const int4*>(columns)[i];
#if PAGED
      const int4 pages = make_int4(page_of(four.x), page_of(four.y), page_of(four.z),
                                   page_of(four.w));
      four = make_int4(row_of(four.x, pages.x), row_of(four.y, pages.y), row_of(four.z, pages.z),
                       row_of(four.w, pages.w));
#endif
      reinterpret_cast<int4*>(out)[i] = four;
    }
  }

  // All columns of a row that has at most k, then -1.
  DEVICE void write_all(int* out, u32 k) const {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < k; i += THREADS) {
      out[i] = report(i < length ? static_cast<int>(i) : -1);
    }
  }
};

// No `__ldg` here: it may be moved ahead of the wait for the kernel that writes what it reads.
struct Problem {
  const float* scores;
  long long stride;  // of a row, in scores
  int width;         // columns that exist
  const int* starts;
  const int* ends;
  const int* tables;
  long long table_stride;
  const int* requests;
  int page_shift;
  int longest;  // columns that a row of the tables has pages for

  DEVICE Row row(u32 index) const {
    const int end = ends[index], start = starts ? max(starts[index], 0) : 0;
    const int length = min(min(end, width) - start, longest);
    const int* table = nullptr;
#if PAGED
    table = tables + (requests ? requests[index] : static_cast<int>(index)) * table_stride;
#endif
    return {scores + index * stride + start, static_cast<u32>(max(length, 0)), table,
            static_cast<u32>(page_shift)};
  }
};

#define PROBLEM_PARAMETERS                                                               \
  const float *scores, long long stride, int width, const int *starts, const int *ends, \
      const int *tables, long long table_stride, const int *requests, int page_shift, int longest
#define PROBLEM                                                                                 \
  Problem {                                                                                     \
    scores, stride, width, starts, ends, tables, table_stride, requests, page_shift, longest    \
  }

// Scores in groups of four that are aligned in memory. The first and the last group may extend
// past the row, into bytes of the same 16 and so of the same allocation.
struct Groups {
  const float4* first;
  u32 skip;  // scores of the first group that precede the row
  u32 length;

  DEVICE explicit Groups(const Row& row) {
    skip = static_cast<u32>(reinterpret_cast<u64>(row.scores) >> 2) & 3;
    first = reinterpret_cast<const float4*>(row.scores - skip);
    length = row.length;
  }
  DEVICE u32 count() const { return (skip + length + 3) / 4; }
  DEVICE u32 column(u32 group) const { return 4 * group - skip; }  // of its first score; wraps
  DEVICE bool inside(u32 from, u32 to) const {  // all scores of these groups belong to the row
    return 4 * from >= skip && 4 * to <= skip + length;
  }
  DEVICE bool has(u32 group, u32 i) const { return column(group) + i < length; }
  DEVICE float4 load(u32 group) const { return __ldcs(first + group); }
};
