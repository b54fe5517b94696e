#include "test/fake_link.h"

#include <algorithm>
#include <cstring>

#include "base/crc32c.h"

namespace shoal::test {
namespace {

constexpr size_t kNone = ~size_t{0};

}  // namespace

// splitmix64. Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
uint64_t FakeRandom::next() {
  uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

// ---- the net

FakeNet::FakeNet(int n_ranks, const Options& chosen)
    : options(chosen),
      n_ranks_(n_ranks),
      seal_(FrameKeys(chosen.job_key, chosen.epoch, 0, 0).out(0)),
      random_(chosen.seed),
      n_delivered_(static_cast<size_t>(n_ranks), 0),
      wires_(static_cast<size_t>(n_ranks * n_ranks)),
      links_(wires_.size(), nullptr),
      paths_(*this, n_ranks),
      arenas_(static_cast<size_t>(n_ranks)) {}

FakeNet::~FakeNet() = default;

void FakeNet::seal(Header& header, const std::byte* payload, size_t n_bytes) const {
  header.length = static_cast<uint32_t>(n_bytes);
  header.payload_crc = n_bytes == 0 ? 0 : crc32c(0, payload, n_bytes);
  header.seal = seal_.of(header, {});
}

std::unique_ptr<Link> FakeNet::link(int rank, int peer) {
  if (options.n_paths == 0) return std::make_unique<FakeLink>(*this, rank, peer);
  return paths_.link(rank, peer);
}

void FakeNet::cut(int a, int b) {
  for (uint32_t path = 0; path < options.n_paths; ++path) cut_path(a, b, path);
  for (Wire* one_way : {&wire(a, b), &wire(b, a)}) {
    one_way->parcels.clear();
    one_way->cut = true;
  }
}

bool FakeNet::is_idle() const {
  const auto busy = [](const FakeLink* link) {
    return link != nullptr &&
           (!link->queue_.empty() || !link->reports_.empty() || !link->moves_.empty() ||
            !link->releases_.empty() || link->receiving_now_);
  };
  return std::none_of(links_.begin(), links_.end(), busy) &&
         std::all_of(wires_.begin(), wires_.end(),
                     [](const Wire& one_way) { return one_way.parcels.empty(); }) &&
         paths_.is_idle();
}

void FakeNet::accuse(const std::string& what) {
  if (violation_.empty()) violation_ = what;
}

// ---- out

FakeLink::FakeLink(FakeNet& net, int rank, int peer) : net_(net), rank_(rank), peer_(peer) {
  FakeLink*& own = net_.links_[static_cast<size_t>(rank * net_.n_ranks_ + peer)];
  if (own != nullptr) net_.accuse("a second link between the same two ranks");
  own = this;
}

FakeLink::~FakeLink() {
  close();
  net_.links_[static_cast<size_t>(rank_ * net_.n_ranks_ + peer_)] = nullptr;
}

bool FakeLink::send(const Frame& frame) {
  if (closed_) return true;
  const size_t n_bytes = frame.header.length;
  if (n_bytes > Header::kMaxPayload) net_.accuse("a payload above the limit was sent");
  if (shares_memory() && frame.header.type == FrameType::kData && n_bytes > max_inline())
    net_.accuse("a large payload was sent through shared memory instead of offered by place");
  Parcel parcel;
  parcel.header = frame.header;
  // Read at once: if the sender writes to a borrowed payload before sent(), the receiver sees it.
  net_.seal(parcel.header, frame.bytes(), n_bytes);
  const bool is_free = frame.payload == nullptr || n_bytes <= net_.options.copied;
  if (is_free) {
    parcel.own.assign(frame.bytes(), frame.bytes() + n_bytes);
  } else {
    parcel.borrowed = frame.payload;
    parcel.is_lent_by_call = frame.is_lent_by_call;
    parcel.token = frame.token;
  }
  queue_.push_back(std::move(parcel));
  return is_free;
}

bool FakeLink::flush(FrameSink& sink) {
  bool moved = report(sink);
  moved |= finish_moves(sink);
  moved |= finish_releases(sink);
  const size_t room = net_.options.room == 0 ? kNone : net_.options.room;
  while (!closed_ && !queue_.empty() && !out().cut && out().parcels.size() < room) {
    Parcel parcel = std::move(queue_.front());
    queue_.pop_front();
    put_on_wire(std::move(parcel));
    moved = true;
  }
  return report(sink) || moved;
}

// The seed decides here everything that happens to a frame.
void FakeLink::put_on_wire(Parcel parcel) {
  const FakeNet::Options& options = net_.options;
  FakeRandom& random = net_.random_;
  const bool in_order = parcel.header.type == FrameType::kGoodbye;
  parcel.due = net_.now_;
  if (random.chance(options.delays)) parcel.due += 1 + random.below(options.longest_delay);
  parcel.overtakes = random.chance(options.reorders) && !in_order;
  parcel.splits = random.chance(options.splits);
  if (!random.chance(options.reads_late)) read(parcel);
  if (net_.tamper) {
    read(parcel);
    net_.tamper(rank_, parcel.header, parcel.own);
    net_.seal(parcel.header, parcel.own.data(), parcel.own.size());
  }
  if (random.chance(options.corrupts)) damage(parcel);
  if (++net_.n_sent_ == options.cuts_at || random.chance(options.cuts))
    return net_.cut(rank_, peer_);
  out().parcels.push_back(std::move(parcel));
}

// The parcel owns the payload from now on; the sender is notified.
void FakeLink::read(Parcel& parcel) {
  if (parcel.borrowed == nullptr) return;
  parcel.own.assign(parcel.borrowed, parcel.borrowed + parcel.header.length);
  parcel.borrowed = nullptr;
  if (parcel.token == 0) return;
  reports_.push_back({std::exchange(parcel.token, 0), net_.now_ + late(net_.options.reports_late)});
}

// Steps until an event is complete.
uint64_t FakeLink::late(double chance) {
  return net_.random_.chance(chance) ? 1 + net_.random_.below(net_.options.longest_delay) : 0;
}

void FakeLink::damage(Parcel& parcel) {
  read(parcel);
  parcel.damaged = true;
  net_.n_corrupted_++;
  const uint64_t bit = net_.random_.below((sizeof(Header) + parcel.own.size()) * 8);
  auto* bytes = reinterpret_cast<std::byte*>(&parcel.header);
  if (bit / 8 >= sizeof(Header)) bytes = parcel.own.data() - sizeof(Header);
  bytes[bit / 8] ^= std::byte{1} << (bit % 8);
}

bool FakeLink::report(FrameSink& sink) {
  bool moved = false;
  // Not in order: a medium with several queues completes them in any order.
  for (size_t at = 0; at < reports_.size() && !closed_;) {
    if (reports_[at].due > net_.now_) {
      ++at;
      continue;
    }
    const uint64_t token = reports_[at].token;
    reports_.erase(reports_.begin() + static_cast<std::ptrdiff_t>(at));
    sink.sent(peer_, token);
    moved = true;
  }
  return moved;
}

// ---- in

bool FakeLink::pump(FrameSink& sink) {
  if (closed_) return false;
  const bool moved = flush(sink);
  if (!closed_ && in().cut) {
    fail(sink, "closed the connection without a goodbye (its process died, or its host)", true);
    return true;
  }
  return deliver(sink) || moved;
}

bool FakeLink::deliver(FrameSink& sink) {
  bool moved = false;
  for (size_t left = in().parcels.size() + (receiving_now_ ? 1 : 0); left > 0 && !closed_; --left) {
    if (!receiving_now_) {
      if (!begin(sink)) break;
      moved = true;
    }
    if (!receiving_now_) continue;  // no payload, or the payload was in readable memory
    moved = true;
    if (!land(sink)) break;
  }
  if (!closed_ && in().ended && in().parcels.empty() && !receiving_now_) {
    fail(sink, "closed the connection without a goodbye (its process died, or its host)", true);
    return true;
  }
  return moved;
}

// The frame that is next: the first, or one that overtakes it.
size_t FakeLink::next_due() {
  const auto& parcels = in().parcels;
  std::vector<size_t> candidates;
  for (size_t at = 0; at < parcels.size(); ++at)
    if (parcels[at].due <= net_.now_ && (at == 0 || parcels[at].overtakes))
      candidates.push_back(at);
  return candidates.empty() ? kNone : candidates[net_.random_.below(candidates.size())];
}

FakeLink::Parcel FakeLink::take(size_t at) {
  auto& parcels = in().parcels;
  Parcel parcel = std::move(parcels[at]);
  parcels.erase(parcels.begin() + static_cast<std::ptrdiff_t>(at));
  net_.n_delivered_[static_cast<size_t>(rank_)]++;
  return parcel;
}

// Begins the next frame; false if none is due.
bool FakeLink::begin(FrameSink& sink) {
  const size_t at = next_due();
  if (at == kNone) return false;
  current_ = take(at);
  const Header& header = current_.header;
  n_landed_ = 0;
  receive_buffer_ = {};
  receiving_now_ = true;
  if (!net_.seal_.fits(header, {})) {
    fail(sink, "sent a corrupt header: its seal does not fit");
  } else if (header.length == 0) {
    end(sink);
  } else if (shares_memory()) {
    diverted_.assign(header.length, std::byte{});
    receive_buffer_ = diverted_;
    current_.splits = false;
    land(sink);
  } else {
    receive_buffer_ = sink.receive_buffer(peer_, header);
    if (!closed_ && receive_buffer_.size() != header.length)
      fail(sink, "sent a frame of " + std::to_string(header.length) + " B that was not expected");
  }
  return true;
}

// Advances the current frame; true when it is complete.
bool FakeLink::land(FrameSink& sink) {
  const size_t rest = receive_buffer_.size() - n_landed_;
  const size_t piece = current_.splits && rest > 0 ? 1 + net_.random_.below(rest) : rest;
  const std::byte* from = current_.borrowed != nullptr ? current_.borrowed : current_.own.data();
  // A receiver without memory provides no buffer.
  if (piece > 0) std::memcpy(receive_buffer_.data() + n_landed_, from + n_landed_, piece);
  n_landed_ += piece;
  if (n_landed_ < receive_buffer_.size()) return false;
  FakeLink* sender = net_.links_[static_cast<size_t>(peer_ * net_.n_ranks_ + rank_)];
  if (current_.borrowed != nullptr && sender != nullptr && !sender->closed_) sender->read(current_);
  end(sink);
  return true;
}

void FakeLink::end(FrameSink& sink) {
  const Parcel parcel = std::move(current_);
  current_ = {};
  receiving_now_ = false;
  const std::vector<std::byte> keep = std::move(diverted_);
  diverted_.clear();
  const Header& header = parcel.header;
  if (header.length > 0 &&
      crc32c(0, receive_buffer_.data(), receive_buffer_.size()) != header.payload_crc) {
    if (!parcel.damaged)
      net_.accuse("a payload was overwritten while it was borrowed, or while it landed: type " +
                  std::to_string(static_cast<int>(header.type)) + ", flow " +
                  std::to_string(header.flow) + ", segment " + std::to_string(header.segment));
    return fail(sink, "sent a corrupt payload (" + std::to_string(header.length) +
                          " B, checksum does not match)");
  }
  sink.arrived(peer_, header, receive_buffer_);
}

void FakeLink::fail(FrameSink& sink, const std::string& what, bool of_path) {
  if (closed_) return;
  close();
  sink.broken(peer_, {Fault::kPeerLost, peer_, what, {}, of_path});
}

// ---- the end

bool FakeLink::release(uint64_t token, const CallId& call) {
  const uint64_t wait = closed_ ? 0 : late(net_.options.releases_late);
  if (wait == 0)
    let_go(call);
  else
    releases_.push_back({token, net_.now_ + wait, call});
  return wait == 0;
}

bool FakeLink::finish_releases(FrameSink& sink) {
  bool moved = false;
  for (size_t at = 0; at < releases_.size() && !closed_;) {
    if (releases_[at].due > net_.now_) {
      ++at;
      continue;
    }
    const Release release = releases_[at];
    releases_.erase(releases_.begin() + static_cast<std::ptrdiff_t>(at));
    let_go(release.call);
    sink.released(peer_, release.token);
    moved = true;
  }
  return moved;
}

void FakeLink::let_go(const CallId& call) {
  const auto is_lent = [&](const Parcel& parcel) {
    return parcel.is_lent_by_call && parcel.borrowed != nullptr && call_of(parcel.header) == call;
  };
  std::erase_if(queue_, is_lent);
  std::erase_if(moves_, [&](const Move& move) { return move.call == call; });
  for (Parcel& parcel : out().parcels)
    if (is_lent(parcel)) read(parcel);
  FakeLink* receiver = net_.links_[static_cast<size_t>(peer_ * net_.n_ranks_ + rank_)];
  if (receiver != nullptr && receiver->receiving_now_ && is_lent(receiver->current_))
    read(receiver->current_);
  if (receiving_now_ && call_of(current_.header) == call) {
    diverted_.assign(receive_buffer_.begin(), receive_buffer_.end());
    receive_buffer_ = diverted_;
  }
}

void FakeLink::close() {
  if (closed_) return;
  closed_ = true;
  queue_.clear();
  reports_.clear();
  moves_.clear();
  releases_.clear();
  // Memory that this end has not read yet is never sent, nor is anything queued behind it.
  auto& parcels = out().parcels;
  const auto unread = std::find_if(parcels.begin(), parcels.end(),
                                   [](const Parcel& parcel) { return parcel.borrowed != nullptr; });
  parcels.erase(unread, parcels.end());
  out().ended = true;
  FakeLink* receiver = net_.links_[static_cast<size_t>(peer_ * net_.n_ranks_ + rank_)];
  if (receiver != nullptr && receiver->receiving_now_ && receiver->current_.borrowed != nullptr)
    out().cut = true;
  in().parcels.clear();
  current_ = {};
  receiving_now_ = false;
  receive_buffer_ = {};
}

// ---- shared memory

bool FakeLink::share(uint32_t id) {
  if (closed_ || !shares_memory()) return false;
  if (shared_.count(id) != 0) return true;
  const auto region = Regions::of_process().with_id(id);
  if (region.id == 0 || net_.random_.chance(net_.options.refuses_share)) return false;
  // Descriptors travel separately, ahead of the frames that name them.
  FakeLink* receiver = net_.links_[static_cast<size_t>(peer_ * net_.n_ranks_ + rank_)];
  Mapping mapping;
  if (receiver == nullptr || Mapping::map(region.fd, region.size, mapping)) return false;
  receiver->regions_[id] = std::move(mapping);
  shared_.insert(id);
  return true;
}

std::byte* FakeLink::address_of(const Remote& there, size_t n_bytes) {
  const auto found = regions_.find(there.place);
  if (found == regions_.end()) return nullptr;
  const Mapping& mapping = found->second;
  const bool fits = there.offset <= mapping.size() && n_bytes <= mapping.size() - there.offset;
  return fits ? mapping.data() + there.offset : nullptr;
}

Moved FakeLink::put(uint64_t token, const CallId& call, const std::byte* from, size_t n_bytes,
                    const Remote& to) {
  std::byte* at = address_of(to, n_bytes);
  if (at == nullptr) return Moved::kNowhere;
  return begin_move({token, 0, call, [=] {
                       std::memcpy(at, from, n_bytes);
                       return Moved::kDone;
                     }});
}

Moved FakeLink::get(uint64_t token, const CallId& call, const Remote& from, const Into& into) {
  if (from.in_slot) {
    const FakeNet::Arena& arena = net_.arenas_[static_cast<size_t>(peer_)];
    if (from.place >= arena.stamps.size() || into.n_bytes > Slots::kSlotBytes)
      return Moved::kNowhere;
    const std::byte* slot = arena.slots + from.place * Slots::kSlotBytes;
    const std::atomic<uint64_t>& stamp = arena.stamps[from.place];
    return begin_move({token, 0, call, [&stamp, slot, from, into] {
                         return Slots::read(slot, stamp, from.offset, into);
                       }});
  }
  const std::byte* at = address_of(from, into.n_bytes);
  if (at == nullptr) return Moved::kNowhere;
  return begin_move({token, 0, call, [at, into] {
                       into.take(at);
                       return Moved::kDone;
                     }});
}

Moved FakeLink::begin_move(Move move) {
  const uint64_t wait = late(net_.options.moves_late);
  if (wait == 0) return move.run();
  move.due = net_.now_ + wait;
  if (net_.random_.chance(0.5)) move.run = [how = move.run()] { return how; };
  moves_.push_back(std::move(move));
  return Moved::kLater;
}

bool FakeLink::finish_moves(FrameSink& sink) {
  bool moved = false;
  for (size_t at = 0; at < moves_.size() && !closed_;) {
    if (moves_[at].due > net_.now_) {
      ++at;
      continue;
    }
    const Move move = std::move(moves_[at]);
    moves_.erase(moves_.begin() + static_cast<std::ptrdiff_t>(at));
    sink.moved(peer_, move.token, move.run());
    moved = true;
  }
  return moved;
}

}  // namespace shoal::test
