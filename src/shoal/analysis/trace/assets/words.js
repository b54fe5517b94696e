// The texts of the page.

let shownCaption = null, shownCellsOf = null;

function showWords(current) {
  $("scrub").value = position;
  $("scrub").style.setProperty("--done", `${lastRound ? position / lastRound * 100 : 100}%`);
  if (shownCellsOf !== shownRound) showCells();
  if (shownCaption === current && document.body.dataset.round === `${shownRound}`) return;
  shownCaption = current;
  document.body.dataset.round = shownRound;
  const ended = shownRound === lastRound;
  document.body.dataset.end = ended ? (allKept() ? "proved" : "wrong") : "";
  $("round").textContent = current ? `round ${current} of ${lastRound}` : "start";
  $("caption").textContent = ended ? ending() : captionOf(current);
  const messages = [...trace.rounds[current].messages].sort((a, b) => a[0] - b[0] || a[2] - b[2]);
  const shown = messages.slice(0, 300), rest = messages.length - shown.length;
  const lines = shown.map(([sender, , receiver, target, folds, value]) =>
    `${sender} → ${receiver}  ${placeName(receiver, target)} ${folds ? "+" : "="} ${textOf(value)}`);
  if (rest) lines.push(`and ${rest} more`);
  $("messages").replaceChildren(...(lines.length ? lines : ["none"]).map((words) => {
    const item = document.createElement("li");
    item.textContent = words;
    return item;
  }));
}

const collective = trace.collective.replace(/_/g, "-");

function ending() {
  return document.body.dataset.end === "proved"
    ? `Proved: every rank ends with what ${collective} must leave.`
    : `Wrong: not every rank ends with what ${collective} must leave.`;
}

function captionOf(current) {
  if (!current) return "What every rank starts with.";
  const { messages } = trace.rounds[current], folds = new Set(messages.map((one) => one[4]));
  const what = folds.size > 1 ? "folded into what is held or stored"
    : folds.has(true) ? "folded into what its receiver holds" : "stored by its receiver";
  return `${count(messages.length, "message")}, each ${what}.`;
}

const cells = new Map();

let fresh = [];

function showCells() {
  fresh.forEach((cell) => cell.classList.remove("fresh"));
  for (const key of staleCells) {
    const [rank, place] = key.split(" ").map(Number), cell = cells.get(key);
    cell.textContent = textOf(held[rank][place]);
    cell.classList.toggle("kept", isKept(rank, place));
  }
  const { writes } = trace.rounds[shownRound];
  fresh = shownRound ? writes.map(([rank, place]) => cells.get(`${rank} ${place}`)) : [];
  fresh.forEach((cell) => cell.classList.add("fresh"));
  staleCells.clear();
  shownCellsOf = shownRound;
}

function buildWords() {
  const name = trace.algorithm;
  document.title = `${name} ${collective}, ${count(trace.ranks, "rank")}`;
  $("algorithm").textContent = name;
  $("collective").textContent = trace.root === null ? collective : `${collective}, root ${trace.root}`;
  $("summary").textContent = trace.summary;
  $("remarks").textContent = trace.remarks;
  const nMessages = trace.rounds.reduce((n, round) => n + round.messages.length, 0);
  const counts = [["ranks", trace.ranks], ["rounds", lastRound], ["messages", nMessages]];
  if (nHosts > 1) counts.unshift(["hosts", nHosts]);
  for (const [list, pairs] of [["counts", counts], ["fields", Object.entries(trace.fields)]]) {
    for (const [term, words] of pairs) {
      const group = list === "counts" ? $(list).appendChild(document.createElement("div")) : $(list);
      group.appendChild(document.createElement("dt")).textContent = term;
      group.appendChild(document.createElement("dd")).textContent = words.toLocaleString("en");
    }
  }
  trace.places.forEach((places, rank) => {
    const row = $("state").insertRow();
    row.appendChild(document.createElement("th")).textContent = `rank ${rank}`;
    places.forEach((_, place) => {
      const cell = row.insertCell();
      cell.title = placeName(rank, place);
      cell.textContent = textOf(null);
      cells.set(`${rank} ${place}`, cell);
    });
  });
  $("scrub").max = lastRound;
  for (let round = 0; lastRound && lastRound <= 130 && round <= lastRound; round++) {
    $("ticks").appendChild(document.createElement("i")).style.left = `${round / lastRound * 100}%`;
  }
}
