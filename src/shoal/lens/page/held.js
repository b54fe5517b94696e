"use strict";
// Plays the trace in #trace. Position p: the whole part is the round whose end is shown, the
// fraction is how far the messages of the next round have come.

const trace = JSON.parse(document.getElementById("trace").textContent);
const $ = (id) => document.getElementById(id);
const lastRound = trace.rounds.length - 1;
const still = matchMedia("(prefers-reduced-motion: reduce)");

// What every rank holds at the end of any round, and the names of it all.

const held = trace.places.map((places) => places.map(() => null));
let shownRound = -1;
for (const round of trace.rounds) {
  // Remember what each write replaces, so that rounds can be taken back.
  for (const write of round.writes) {
    const [rank, place, value] = write;
    write.push(held[rank][place]);
    held[rank][place] = value;
  }
}
held.forEach((places) => places.fill(null));

function goToRound(target) {
  while (shownRound < target) {
    shownRound += 1;
    for (const [rank, place, value] of trace.rounds[shownRound].writes) held[rank][place] = value;
  }
  while (shownRound > target) {
    const writes = trace.rounds[shownRound].writes;
    for (let i = writes.length - 1; i >= 0; i--) held[writes[i][0]][writes[i][1]] = writes[i][3];
    shownRound -= 1;
  }
}

const promised = trace.promised.map((wanted) => {
  const byPlace = new Map();
  for (const [place, chunk, first, last, finished] of wanted) {
    byPlace.set(place, { chunk, first, last, finished });
  }
  return byPlace;
});

/** Whether a rank's place holds what it must hold at the end. */
function isKept(rank, place) {
  const want = promised[rank].get(place);
  if (!want || held[rank][place] === null) return false;
  const [chunk, ranks, finished] = trace.values[held[rank][place]];
  const distinct = new Set(ranks);
  return chunk === want.chunk && finished === want.finished &&
    distinct.size === want.last - want.first + 1 &&
    ranks.every((rank_) => rank_ >= want.first && rank_ <= want.last);
}

function allKept() {
  return promised.every((wanted, rank) => [...wanted.keys()].every((place) => isKept(rank, place)));
}

function letter(chunk) {
  return (chunk >= 26 ? letter(Math.floor(chunk / 26) - 1) : "") +
    String.fromCharCode(97 + chunk % 26);
}

function textOf(value) {
  if (value === null) return "–";
  const [chunk, ranks] = trace.values[value];
  return ranks.map((rank) => letter(chunk) + rank).join("");
}

function placeName(rank, place) {
  const [buffer, chunk] = trace.places[rank][place];
  return `${buffer === "data" ? "chunk" : buffer} ${chunk}`;
}

const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
