// What the sampling kernel needs besides emulator.h, after which it is included.
#include <algorithm>
#include <atomic>
#undef DEVICE
#define DEVICE inline

static int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
static u64 __umul64hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }

// The value of another lane, or this lane's own if there is none.
static u64 from_lane(u64 value, int lane) {
  Warp& warp = my_warp();
  std::memcpy(warp.words[lane_id()], &value, sizeof(value));
  warp.gate.arrive_and_wait();
  u64 other = value;
  if (lane >= 0) std::memcpy(&other, warp.words[lane], sizeof(other));
  warp.gate.arrive_and_wait();
  return other;
}
static u64 __shfl_up_sync(u32, u64 value, u32 step) {
  return from_lane(value, int(lane_id()) - int(step));
}
static u64 exchange(u32, u64 value, u32 step) { return from_lane(value, int(lane_id() ^ step)); }
#define __shfl_xor_sync exchange
