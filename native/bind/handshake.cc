// The handshake, as clients of the store speak it over sockets of their own.
#include "transport/handshake.h"

#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include "bind/handshake.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {
namespace {

nb::bytes python_bytes(Bytes bytes) { return nb::bytes(bytes.data(), bytes.size()); }

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
          [](ClientHandshake* self, const Hello& hello, const nb::bytes& key) {
            new (self) ClientHandshake(hello, Secret(bytes_of(key)));
          },
          "hello"_a, "key"_a)
      .def_prop_ro("hello", [](ClientHandshake& end) { return python_bytes(end.hello()); })
      .def_prop_ro("wants", [](ClientHandshake& end) { return end.wants(); })
      .def_prop_ro("progress", [](ClientHandshake& end) { return end.progress(); })
      .def("feed", [](ClientHandshake& end, const nb::bytes& data) {
        std::vector<std::byte> reply;
        end.feed(bytes_of(data), reply);
        return python_bytes(reply);
      });
  m.def(
      "pair_key",
      [](const nb::bytes& key, uint64_t epoch, uint32_t a, uint32_t b, const std::string& role) {
        return python_bytes(pair_key(bytes_of(key), epoch, a, b, role).bytes());
      },
      "key"_a, "epoch"_a, "a"_a, "b"_a, "role"_a = "link");
}

}  // namespace shoal
