// Playing, stepping and scrubbing.

const options = new URLSearchParams(location.hash.slice(1));
const roundMs = Math.min(1500, Math.max(260, 45000 / Math.max(1, lastRound)));
let position = 0, playing = false, last = 0;

function show(where) {
  position = Math.min(lastRound, Math.max(0, where));
  draw();
}

function setPlaying(whether) {
  playing = whether && lastRound > 0;
  if (playing && position >= lastRound) position = 0;
  $("icon").setAttribute("d", playing ? "M7 5h3.5v14H7zM13.5 5H17v14h-3.5z" : "M8 5v14l11-7z");
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
  last = performance.now();
  if (playing) requestAnimationFrame(play);
}

function play(now) {
  if (!playing) return;
  const speed = $("speed").value;
  // Without motion, and as fast as can be, it goes from round to round.
  if (speed === "max") show(Math.floor(position) + 1);
  else if (still.matches) {
    if (now - last < roundMs / speed) return void requestAnimationFrame(play);
    show(Math.floor(position) + 1);
  } else show(position + (now - last) / roundMs * speed);
  last = now;
  if (position >= lastRound) setPlaying(false);
  else requestAnimationFrame(play);
}

function step(change) {
  setPlaying(false);
  show(change < 0 ? Math.ceil(position) - 1 : Math.floor(position) + 1);
}

function onKey(event) {
  if (event.target instanceof HTMLSelectElement || event.ctrlKey || event.metaKey || event.altKey) return;
  const actions = {
    " ": () => setPlaying(!playing), ArrowLeft: () => step(-1), ArrowRight: () => step(1),
    Home: () => { setPlaying(false); show(0); }, End: () => { setPlaying(false); show(lastRound); },
  };
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
}

function onPoint(event) {
  const at = canvas.getBoundingClientRect(), x = event.clientX - at.left, y = event.clientY - at.top;
  const hint = $("hint"), rank = cards.findIndex((card) => inside({ x, y }, card, 0));
  const place = rank < 0 ? -1 : trace.places[rank].findIndex((_, place_) => {
    const { x: left, w } = bar(rank, place_);
    return x >= left && x < left + w;
  });
  hint.hidden = place < 0;
  if (place < 0) return;
  hint.textContent = `rank ${rank}, ${placeName(rank, place)}: ${textOf(held[rank][place])}`;
  hint.style.left = `${Math.min(x + 14, size.width - hint.offsetWidth)}px`;
  hint.style.top = `${Math.min(y + 16, size.height - hint.offsetHeight)}px`;
}

buildWords();
resize();
show(+options.get("round") || 0);
if (options.has("speed")) $("speed").value = options.get("speed");
setPlaying(options.has("autoplay"));
$("play").onclick = () => setPlaying(!playing);
$("back").onclick = () => step(-1);
$("forward").onclick = () => step(1);
$("scrub").oninput = (event) => { setPlaying(false); show(+event.target.value); };
addEventListener("keydown", onKey);
addEventListener("resize", () => { resize(); draw(); });
matchMedia("(prefers-color-scheme: dark)").onchange = () => { restyle(); draw(); };
canvas.onpointermove = onPoint;
canvas.onpointerleave = () => { $("hint").hidden = true; };
