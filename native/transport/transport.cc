#include "transport/transport.h"

#include "transport/shm_link.h"
#include "transport/tcp_link.h"

namespace shoal {

const std::vector<Transport>& transports() {
  static const std::vector<Transport> all = {
      {"shm", ShmLink::reaches, ShmLink::connect},
      {"tcp", TcpLink::reaches, TcpLink::connect},
  };
  return all;
}

Error connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out) {
  for (const Transport& one : transports())
    if (one.reaches(peer)) return one.connect(site, peer, out);
  return {Fault::kInternal, peer.rank, "no transport reaches this peer"};
}

}  // namespace shoal
