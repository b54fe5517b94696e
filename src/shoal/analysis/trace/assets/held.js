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

// The places that changed since they were drawn, and since their cells showed it: "rank place".
const undrawn = new Set(), staleCells = new Set();

function hold(rank, place, value) {
  held[rank][place] = value;
  undrawn.add(`${rank} ${place}`);
  staleCells.add(`${rank} ${place}`);
}

function goToRound(target) {
  while (shownRound < target) {
    shownRound += 1;
    for (const [rank, place, value] of trace.rounds[shownRound].writes) hold(rank, place, value);
  }
  while (shownRound > target) {
    const writes = trace.rounds[shownRound].writes;
    for (let i = writes.length - 1; i >= 0; i--) hold(writes[i][0], writes[i][1], writes[i][3]);
    shownRound -= 1;
  }
}

const postcondition = trace.postcondition.map((wanted) => {
  const byPlace = new Map();
  for (const [place, chunk, first, last, finished] of wanted) {
    byPlace.set(place, { chunk, first, last, finished });
  }
  return byPlace;
});

// Of each value: the ranks that contributed to it, once each, first to last, and their limits.
const contributions = trace.values.map(([, ranks]) => [...new Set(ranks)]);
const limits = contributions.map((ranks) => [Math.min(...ranks), Math.max(...ranks)]);

/** Whether a rank's place holds what it must hold at the end. */
function isKept(rank, place) {
  const want = postcondition[rank].get(place), value = held[rank][place];
  if (!want || value === null) return false;
  const [chunk, , finished] = trace.values[value], [first, last] = limits[value];
  return chunk === want.chunk && finished === want.finished && first === want.first &&
    last === want.last && contributions[value].length === last - first + 1;
}

function allKept() {
  return postcondition.every((wanted, rank) => [...wanted.keys()].every((place) => isKept(rank, place)));
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
