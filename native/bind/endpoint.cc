// The control plane's endpoint. All of it runs under the interpreter's lock, and nothing waits: a
// daemon thread that waited here as the interpreter ends would abort the process.
#include "transport/endpoint.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <exception>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "bind/endpoint.h"
#include "bind/handshake.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

constexpr double kLongestS = 3.2e9;  // a century stands for "for ever"

int64_t ns_of(double seconds) {
  return static_cast<int64_t>(std::clamp(seconds, 0.0, kLongestS) * 1e9);
}

double seconds_of(int64_t ns) {
  if (ns == Endpoint::kNever) return std::numeric_limits<double>::infinity();
  return static_cast<double>(ns) / 1e9;
}

// Asks a Python object, which may own the endpoint; the garbage collector can follow the reference.
class PythonEndpoint final : Endpoint::Owner {
 public:
  PythonEndpoint(nb::object owner, double pending_s, double dial_s, size_t most_queued,
                 double patience_s, const std::vector<nb::bytes>& beginnings) try
      : owner_(std::move(owner)),
        endpoint_(*this, options_of(pending_s, dial_s, most_queued, patience_s, beginnings)) {
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  PythonEndpoint(const PythonEndpoint&) = delete;

  Endpoint& endpoint() { return endpoint_; }

  void step(double now) {
    endpoint_.step(ns_of(now));
    if (failed_) std::rethrow_exception(std::exchange(failed_, nullptr));
  }

  void close() {
    endpoint_.close();
    owner_.reset();  // NOT left to the collector: the owner may hold a lot
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<PythonEndpoint>(self)->owner_.ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<PythonEndpoint>(self)->close();
    return 0;
  }

 private:
  static Endpoint::Options options_of(double pending_s, double dial_s, size_t most_queued,
                                      double patience_s, const std::vector<nb::bytes>& beginnings) {
    Endpoint::Options options{ns_of(pending_s), ns_of(dial_s), most_queued, ns_of(patience_s), {}};
    for (const nb::bytes& one : beginnings) {
      Acceptor::Beginning& beginning = options.beginnings.emplace_back();
      if (one.size() != beginning.size()) throw std::invalid_argument("a prefix must have 4 bytes");
      std::copy_n(one.c_str(), beginning.size(), beginning.begin());
    }
    return options;
  }

  // Called inside the acceptor, which continues whatever Python raises.
  std::variant<Secret, Progress> judge(const Hello& hello) override {
    try {
      const nb::object owner = owner_;  // which may close the endpoint
      const nb::object verdict = owner.attr("admit")(hello);
      if (nb::isinstance<nb::bytes>(verdict)) return Secret(bytes_of(nb::cast<nb::bytes>(verdict)));
      return nb::cast<Progress>(verdict);
    } catch (...) {
      failed_ = std::current_exception();
      return Progress::kRefused;
    }
  }

  template <class... Args>
  void call(const char* name, Args&&... args) {
    const nb::object owner = owner_;  // which may close the endpoint
    owner.attr(name)(std::forward<Args>(args)...);
  }

  void welcome(const Endpoint::PeerPtr& peer, const Hello& hello) override {
    call("welcome", peer, hello);
  }
  void key_differs(const Hello& hello) override { call("key_differs", hello); }
  void take_stranger(int fd) override { call("take_stranger", fd); }
  void turned_away(uint64_t n_so_far, const std::string& caller) override {
    call("turned_away", n_so_far, caller);
  }
  void reached(const Endpoint::PeerPtr& peer, uint64_t dial) override {
    call("reached", peer, dial);
  }
  void not_reached(const Connector::Failure& failure) override {
    call("not_reached", failure.number, failure.error, failure.progress, failure.was_connected);
  }
  void received(const Endpoint::PeerPtr& peer, Frame frame) override {
    call("received", peer, frame.kind, nb::bytes(frame.body.data(), frame.body.size()), frame.fd);
  }
  void lost(const Endpoint::PeerPtr& peer, int error, const std::string& why) override {
    call("lost", peer, error, why);
  }

  nb::object owner_;
  std::exception_ptr failed_;
  Endpoint endpoint_;
};

PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(PythonEndpoint::traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(PythonEndpoint::clear)},
                       {0, nullptr}};

uint64_t connect(PythonEndpoint& self, const Address& to, const Hello& hello,
                 const nb::bytes& key) {
  if (to.length == 0) throw std::invalid_argument("not an address to connect to");
  return self.endpoint().connect(to, hello, Secret(bytes_of(key)));
}

}  // namespace

void bind_endpoint(nb::module_& m) {
  nb::class_<Peer>(m, "Peer")
      .def("expect", &Peer::expect, "kind"_a, "most_bytes"_a, "takes_fd"_a = false)
      .def(
          "send",
          [](Peer& self, uint16_t kind, const nb::bytes& body, int fd) {
            return self.send(kind, bytes_of(body), fd);
          },
          "kind"_a, "body"_a = nb::bytes("", 0), "fd"_a = -1)
      .def("pause", &Peer::pause, "is_paused"_a)
      .def("close", &Peer::close)
      .def("fileno", &Peer::fd)
      .def_prop_ro("is_open", &Peer::is_open)
      .def_prop_ro("is_local", &Peer::is_local)
      .def_prop_ro("n_queued", &Peer::n_queued);
  nb::class_<PythonEndpoint>(m, "Endpoint", nb::type_slots(slots))
      .def(nb::init<nb::object, double, double, size_t, double, std::vector<nb::bytes>>(),
           "owner"_a, nb::kw_only(), "pending_s"_a = 2.0, "dial_s"_a = 5.0,
           "most_queued"_a = 1 << 20, "patience_s"_a = std::numeric_limits<double>::infinity(),
           "beginnings"_a = std::vector<nb::bytes>())
      .def("fileno", [](PythonEndpoint& self) { return self.endpoint().fd(); })
      .def("step", &PythonEndpoint::step, "now"_a)
      .def_prop_ro("deadline",
                   [](PythonEndpoint& self) { return seconds_of(self.endpoint().deadline()); })
      .def(
          "listen", [](PythonEndpoint& self, int fd) { self.endpoint().listen(fd); }, "fd"_a)
      .def("shut", [](PythonEndpoint& self) { self.endpoint().shut(); })
      .def("hand_over", [](PythonEndpoint& self) { return self.endpoint().hand_over(); })
      .def(
          "connect",
          [](PythonEndpoint& self, const std::string& address, uint16_t port, const Hello& hello,
             const nb::bytes& key) {
            return connect(self, Address::of(address, port), hello, key);
          },
          "address"_a, "port"_a, "hello"_a, "key"_a)
      .def(
          "connect_local",
          [](PythonEndpoint& self, const std::string& name, const Hello& hello,
             const nb::bytes& key) { return connect(self, Address::abstract(name), hello, key); },
          "name"_a, "hello"_a, "key"_a)
      .def("hang_up", [](PythonEndpoint& self, uint64_t dial) { self.endpoint().hang_up(dial); })
      .def_prop_ro("n_pending", [](PythonEndpoint& self) { return self.endpoint().n_pending(); })
      .def_prop_ro("n_turned_away",
                   [](PythonEndpoint& self) { return self.endpoint().n_turned_away(); })
      .def("close", &PythonEndpoint::close);
}

}  // namespace shoal
