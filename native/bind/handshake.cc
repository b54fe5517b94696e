// What an endpoint's owner receives from the handshake.
#include "transport/handshake.h"

#include <nanobind/operators.h>
#include <nanobind/stl/string.h>

#include "bind/handshake.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace shoal {

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
  m.def(
      "pair_key",
      [](const nb::bytes& key, uint64_t epoch, uint32_t a, uint32_t b, const std::string& role) {
        const Secret made = pair_key(bytes_of(key), epoch, a, b, role);
        return nb::bytes(made.bytes().data(), made.bytes().size());
      },
      "key"_a, "epoch"_a, "a"_a, "b"_a, "role"_a = "link");
}

}  // namespace shoal
