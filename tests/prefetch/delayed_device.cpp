// An accelerator for tests: its streams are threads that are late, its memory is not to be touched by the CPU.
//
// Always true:
// - a tensor's address is in a mapping that nobody may read or write; the streams know the same memory under another
//   address, so that reading a tensor of the device from the CPU is a segmentation fault
// - memory is limited: allocation beyond that raises torch.OutOfMemoryError, after all streams were waited for; and if
//   it is pinched, one in so many allocations finds less
// - bytes that cross the bus are counted, in both directions; those of operations of the CPU on copies are not
// - what is put on a stream begins a random time later, and later than the stream's earlier work; two streams know
//   nothing of each other but by events
// - memory that was allocated has other bytes in it until the stream that it was allocated on has written to it
// - memory that was freed is given away again at once, to the same stream, but for the streams that were recorded
// - pinned memory that was freed is overwritten once the copies that use it have ended
// - a held stream does nothing until it is released
//
// Copies are asynchronous, and views are views; any other operation is the CPU's, on copies.

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <sys/mman.h>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 32;
constexpr int kGarbage = 0xA5;
constexpr size_t kAddresses = 1ull << 36;  // memory is taken as it is touched
const c10::Device kDevice(kType, 0);

std::atomic<int> latest{2000};  // microseconds
std::atomic<int64_t> sent{0}, returned{0}, copies{0};  // bytes to the device, and from it; copies to it
std::atomic<bool> heeds_events{true};
thread_local bool computes = false;  // an operation of the CPU on copies

// The device's memory, under two addresses.
struct Arena {
  char* guarded;
  char* open;
  size_t used = 0;

  Arena() {
    const int file = memfd_create("device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, kAddresses) == 0, "no memory for the device");
    auto map = [&](int how) {
      return static_cast<char*>(mmap(nullptr, kAddresses, how, MAP_SHARED | MAP_NORESERVE, file, 0));
    };
    guarded = map(PROT_NONE);
    open = map(PROT_READ | PROT_WRITE);
    TORCH_CHECK(guarded != MAP_FAILED && open != MAP_FAILED, "no addresses for the device");
    close(file);
  }
};

Arena& arena() {
  static auto* all = new Arena;
  return *all;
}

// Where a stream finds what a tensor points to.
void* opened(const void* address) {
  auto* place = static_cast<const char*>(address);
  auto& all = arena();
  return place < all.guarded || place >= all.guarded + kAddresses ? const_cast<void*>(address)
                                                                   : all.open + (place - all.guarded);
}

class Worker {
 public:
  void put(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!begun_) {
      begun_ = true;
      std::thread([this] { run(); }).detach();
    }
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  void hold(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void run() {
    std::minstd_rand chance(std::hash<void*>{}(this));
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty() && !held_; });
      auto task = tasks_.front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(chance() % (latest + 1)));
      task();
      lock.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool begun_ = false, held_ = false;
};

// Never destroyed: their threads outlive main.
Worker& worker(c10::StreamId id) {
  static auto* all = new Worker[kStreams];
  return all[id];
}

thread_local c10::StreamId current = 0;

class Event {
 public:
  void record(Worker& on) {
    std::lock_guard<std::mutex> lock(mutex_);
    on.put([this, version = ++recorded_] {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = std::max(done_, version);
      changed_.notify_all();
    });
  }

  void block(Worker& other) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (heeds_events) {
      other.put([this, version = recorded_] { wait_for(version); });
    }
  }

  void wait() {
    wait_for(recorded_);
  }

  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= recorded_;
  }

 private:
  void wait_for(int64_t version) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= version; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t recorded_ = 0, done_ = 0;
};

struct Block {
  void* memory;
  size_t size;
  c10::StreamId stream;
  std::set<c10::StreamId> others;  // that use it too
};

// As a caching allocator of a real device: freed memory serves the stream that it was allocated on.
class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) {
      return {nullptr, kDevice};
    }
    auto* block = taken(size);
    worker(current).put([=] { memset(opened(block->memory), kGarbage, size); });
    return {block->memory, block, &Memory::free, kDevice};
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(data.get_context());
    if (block != nullptr && block->stream != stream.id()) {
      block->others.insert(stream.id());
    }
  }

  int64_t allocated() {
    std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
  }

  void limit(int64_t capacity) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = capacity;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {std::max<int64_t>(0, capacity_ - allocated_ - lent_), capacity_};
  }

  // One in so many allocations finds a capacity of so many bytes; 0 for none.
  void pinch(int64_t capacity, int64_t one_in) {
    std::lock_guard<std::mutex> lock(mutex_);
    pinched_ = capacity;
    one_in_ = one_in;
  }

  bool initialized() override {
    return true;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(opened(to), opened(from), size);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated_;
    stats.allocated_bytes[0].peak = peak_;
    stats.num_ooms = ooms_;
    return stats;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = allocated_;
  }

 private:
  Block* taken(size_t size) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t capacity = one_in_ != 0 && chance_() % one_in_ == 0 ? std::min(capacity_, pinched_) : capacity_;
    auto fits = [&] { return allocated_ + lent_ + static_cast<int64_t>(size) <= capacity; };
    changed_.wait(lock, [&] { return fits() || lent_ == 0; });
    ooms_ += !fits();
    TORCH_CHECK_WITH(
        OutOfMemoryError, fits(), "delayed out of memory: ", size, " bytes are asked for, ",
        capacity - allocated_, " are free");
    allocated_ += size;
    peak_ = std::max(peak_, allocated_);
    auto found = free_.find({current, size});
    if (found == free_.end()) {
      auto& all = arena();
      auto* memory = all.guarded + all.used;
      all.used += (size + 63) / 64 * 64;
      TORCH_CHECK(all.used <= kAddresses, "the device has no addresses left");
      return new Block{memory, size, current, {}};
    }
    auto* block = found->second;
    free_.erase(found);
    return block;
  }

  static void free(void* context);

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    allocated_ -= block->size;
    if (block->others.empty()) {
      free_.insert({{block->stream, block->size}, block});
      return;
    }
    auto left = std::make_shared<std::atomic<size_t>>(block->others.size());
    lent_ += block->size;
    for (auto other : std::exchange(block->others, {})) {
      worker(other).put([=, this] {
        if (--*left == 0) {
          std::lock_guard<std::mutex> lock(mutex_);
          lent_ -= block->size;
          free_.insert({{block->stream, block->size}, block});
          changed_.notify_all();
        }
      });
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<std::pair<c10::StreamId, size_t>, Block*> free_;
  int64_t allocated_ = 0, peak_ = 0, capacity_ = 1ll << 30;
  int64_t pinched_ = 0, one_in_ = 0, ooms_ = 0;
  std::minstd_rand chance_;
  int64_t lent_ = 0;  // freed, and still used by other streams
};

Memory& device_memory() {
  static auto* memory = new Memory;
  return *memory;
}

void Memory::free(void* context) {
  device_memory().give_back(static_cast<Block*>(context));
}

class Pinned final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* memory = static_cast<char*>(aligned_alloc(4096, (size + 4096) / 4096 * 4096));
    ranges_[memory] = {size, 0, false};
    return {memory, memory, &Pinned::free, c10::Device(c10::DeviceType::CPU)};
  }

  bool holds(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return of(data) != ranges_.end();
  }

  // One more copy out of this memory, or one less.
  void count(const void* data, int by) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = of(data);
    found->second.copies += by;
    release(found);
  }

  bool record_event(void*, void*, c10::Stream) override {
    return true;  // each copy is counted where it is put on its stream
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  at::HostStats get_stats() override {
    return {};
  }
  void empty_cache() override {}
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Range {
    size_t size;
    int copies;
    bool freed;
  };
  using Ranges = std::map<const char*, Range>;

  Ranges::iterator of(const void* data) {
    auto* address = static_cast<const char*>(data);
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) {
      return ranges_.end();
    }
    auto before = std::prev(after);
    return address < before->first + before->second.size ? before : ranges_.end();
  }

  void release(Ranges::iterator range) {
    if (range->second.freed && range->second.copies == 0) {
      memset(const_cast<char*>(range->first), kGarbage, range->second.size);
      ::free(const_cast<char*>(range->first));
      ranges_.erase(range);
    }
  }

  static void free(void* memory);

  std::mutex mutex_;
  Ranges ranges_;
};

Pinned& pinned_memory() {
  static auto* memory = new Pinned;
  return *memory;
}

void Pinned::free(void* memory) {
  auto& pinned = pinned_memory();
  std::lock_guard<std::mutex> lock(pinned.mutex_);
  auto range = pinned.of(memory);
  range->second.freed = true;
  pinned.release(range);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return stream(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<int> made = 0;
    return stream(1 + made++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current, next.id()));
  }
  bool queryStream(const c10::Stream& on) const override {
    return worker(on.id()).idle();
  }
  void synchronizeStream(const c10::Stream& on) const override {
    worker(on.id()).wait();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    for (int id = 0; id < kStreams; ++id) {
      worker(id).wait();
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    device_memory().recordStream(data, on);
  }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->record(worker(on.id()));
  }
  void block(void* event, const c10::Stream& other) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->block(worker(other.id()));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->done();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      static_cast<Event*>(event)->wait();
    }
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}  // streams may know it still

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_memory().holds(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory();
  }
};

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU, which does not hold it.
at::Tensor alias(const at::Tensor& tensor) {
  c10::InferenceMode normal(false);  // the streams are not in inference mode
  return at::from_blob(opened(tensor.data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  auto to = alias(target), from = alias(self);
  const void* host = !self.is_cpu() ? (target.is_cpu() ? target.data_ptr() : nullptr) : self.data_ptr();
  const bool is_pinned = host != nullptr && pinned_memory().holds(host);
  if (!computes) {
    sent += self.is_cpu() ? target.nbytes() : 0;
    copies += self.is_cpu();
    returned += target.is_cpu() ? target.nbytes() : 0;
  }
  if (is_pinned) {
    pinned_memory().count(host, 1);
  }
  worker(current).put([=] {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset);
    to.copy_(from);
    if (is_pinned) {
      pinned_memory().count(host, -1);
    }
  });
  if (host != nullptr && !(non_blocking && is_pinned)) {
    worker(current).wait();
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

// What it held is not kept: results of the CPU are resized so, before they are filled.
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  const auto nbytes = c10::multiply_integers(size) * self.itemsize();
  if (self.storage().nbytes() < nbytes) {
    self.storage().set_data_ptr_noswap(device_memory().allocate(nbytes));
    self.storage().set_nbytes(nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

c10::Scalar item(const at::Tensor& self) {
  return self.cpu().item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool before = std::exchange(computes, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    computes = before;
    throw;
  }
  computes = before;
}

const int registered = [] {
  c10::SetAllocator(kType, &device_memory());
  at::setHostAllocator(kType, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY(delayed, m) {
  m.def("hold(int stream) -> ()", [](int64_t stream) { worker(stream).hold(true); });
  m.def("release(int stream) -> ()", [](int64_t stream) { worker(stream).hold(false); });
  m.def("allocated() -> int", [] { return device_memory().allocated(); });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { device_memory().limit(bytes); });
  m.def("pinch(int bytes, int one_in) -> ()", [](int64_t bytes, int64_t one_in) {
    device_memory().pinch(bytes, one_in);
  });
  m.def("late(int microseconds) -> ()", [](int64_t microseconds) { latest = microseconds; });
  m.def("heed_events(bool heeds) -> ()", [](bool heeds) { heeds_events = heeds; });
  m.def("sent() -> int", [] { return sent.load(); });
  m.def("copies() -> int", [] { return copies.load(); });
  m.def("returned() -> int", [] { return returned.load(); });
}
