// The handshake, as rendezvous speaks it over sockets of its own.
#include "transport/handshake.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "bind/handshake.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

nb::bytes python_bytes(Bytes bytes) { return nb::bytes(bytes.data(), bytes.size()); }

Nonce nonce_of(const std::optional<nb::bytes>& given) {
  if (!given) return fresh_nonce();
  Nonce nonce;
  if (given->size() != nonce.size()) throw std::invalid_argument("a nonce has 16 bytes");
  std::ranges::copy(bytes_of(*given), nonce.begin());
  return nonce;
}

nb::bytes feed(Handshake& end, const nb::bytes& data) {
  std::vector<std::byte> reply;
  end.feed(bytes_of(data), reply);
  return python_bytes(reply);
}

// Holds what may lead back to it: the door that asks keeps its callers.
class Server {
 public:
  Server(nb::object admit, const std::optional<nb::bytes>& nonce)
      : admit_(std::move(admit)),
        end_([this](const Hello& hello) { return judge(hello); }, nonce_of(nonce)) {}
  Server(const Server&) = delete;

  ServerHandshake& end() { return end_; }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Server>(self)->admit_.ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    nb::inst_ptr<Server>(self)->admit_.reset();
    return 0;
  }

 private:
  std::variant<Secret, Progress> judge(const Hello& hello) {
    const nb::object verdict = admit_(hello);
    if (nb::isinstance<nb::bytes>(verdict)) return Secret(bytes_of(nb::cast<nb::bytes>(verdict)));
    return nb::cast<Progress>(verdict);
  }

  nb::object admit_;
  ServerHandshake end_;
};

PyType_Slot server_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Server::traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(Server::clear)},
                              {0, nullptr}};

}  // namespace

void bind_handshake(nb::module_& m) {
  m.attr("HANDSHAKE_MAGIC") = nb::bytes(kHandshakeMagic.data(), kHandshakeMagic.size());
  m.attr("HANDSHAKE_VERSION") = kHandshakeVersion;
  m.attr("N_NONCE_BYTES") = sizeof(Nonce);
  nb::enum_<Progress>(m, "Progress")
      .value("WAITING", Progress::kWaiting)
      .value("DONE", Progress::kDone)
      .value("STALE", Progress::kStale)
      .value("KEY_DIFFERS", Progress::kKeyDiffers)
      .value("REFUSED", Progress::kRefused);
  nb::class_<Hello>(m, "Hello")
      .def(nb::init<uint64_t, uint32_t, uint32_t, uint32_t>(), "epoch"_a, "rank"_a, "to_rank"_a,
           "path"_a = 0)
      .def_ro("epoch", &Hello::epoch)
      .def_ro("rank", &Hello::rank)
      .def_ro("to_rank", &Hello::to_rank)
      .def_ro("path", &Hello::path)
      .def(nb::self == nb::self);
  nb::class_<ClientHandshake>(m, "ClientHandshake")
      .def(
          "__init__",
          [](ClientHandshake* self, const Hello& hello, const nb::bytes& key,
             const std::optional<nb::bytes>& nonce) {
            new (self) ClientHandshake(hello, Secret(bytes_of(key)), nonce_of(nonce));
          },
          "hello"_a, "key"_a, "nonce"_a = nb::none())
      .def_prop_ro("hello", [](ClientHandshake& end) { return python_bytes(end.hello()); })
      .def_prop_ro("wants", [](ClientHandshake& end) { return end.wants(); })
      .def_prop_ro("progress", [](ClientHandshake& end) { return end.progress(); })
      .def("feed", [](ClientHandshake& end, const nb::bytes& data) { return feed(end, data); });
  nb::class_<Server>(m, "ServerHandshake", nb::type_slots(server_slots))
      .def(nb::init<nb::object, std::optional<nb::bytes>>(), "admit"_a, "nonce"_a = nb::none())
      .def_prop_ro("hello", [](Server& server) { return server.end().hello(); })
      .def_prop_ro("wants", [](Server& server) { return server.end().wants(); })
      .def_prop_ro("progress", [](Server& server) { return server.end().progress(); })
      .def("feed", [](Server& server, const nb::bytes& data) { return feed(server.end(), data); });
  m.def(
      "pair_key",
      [](const nb::bytes& key, uint64_t epoch, uint32_t a, uint32_t b, const std::string& role) {
        return python_bytes(pair_key(bytes_of(key), epoch, a, b, role).bytes());
      },
      "key"_a, "epoch"_a, "a"_a, "b"_a, "role"_a = "link");
}

}  // namespace shoal
