// Products of warpgroups that run when they are waited for, not when they are started: results that
// are read too soon are old. Stands between emulator.h and what has the products themselves.
#include <deque>
#include <functional>

static void fail(const char* why);

static thread_local std::deque<std::vector<std::function<void()>>> started;
static thread_local std::vector<std::function<void()>> open_group;

// A product whose operands must be there when it is started, and stay until it is done.
template <typename Operands, typename Product>
static void start(const Operands& operands, const Product& product) {
  const u64 before = operands();
  open_group.push_back([=] {
    if (operands() != before) fail("operands of a product change while it is in flight");
    product();
  });
}

static void wgmma_commit() {
  started.push_back(std::move(open_group));
  open_group.clear();
}
template <int Pending>
static void wgmma_wait() {
  while (started.size() > Pending) {
    for (const auto& product : started.front()) product();
    started.pop_front();
  }
  my_warp().gate.arrive_and_wait();  // products are the warp's, and complete for all of its lanes
}
