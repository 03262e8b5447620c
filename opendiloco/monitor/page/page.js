"use strict";
// Shows what the server sends. Text from other peers is set as text, so that it stays text.

const MAX_TABLE_ROWS = 50;
const OLD_MS = 30000;
const run = new Run();
let count = 0;
let life = null;
let latest = null;
let drawn = 0;
let lookedAt = Date.now(); // when the last look came
let warned = null; // kinds and peers of the warnings shown

const byId = (id) => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function duration(seconds) {
  seconds = Math.max(0, seconds);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${Math.round(seconds)} s`;
}

const whole = (value) => Math.round(value).toLocaleString("en");

function showSnapshot(snapshot) {
  const { run: about } = snapshot;
  document.title = `${about.id}: round ${snapshot.round}`;
  byId("title").textContent = `Run ${about.id}`;
  byId("about").textContent = `${about.model}, ${about.codec}, H = ${about.inner_steps}, contract ` +
    `${about.contract.slice(0, 12)}, lineage ${snapshot.lineage.slice(0, 12)}`;
  const glance = [
    ["round", `${snapshot.round} of ${about.rounds}`], ["workers", snapshot.workers],
    ["tokens/s", whole(snapshot.tokens_per_s)],
    ["phase ends in", snapshot.expected_end === null ? "-" : duration(snapshot.expected_end - snapshot.time)],
    ["validation loss", snapshot.validation === null ? "-" : snapshot.validation.loss.toFixed(3)],
    ["tokens trained on", whole(snapshot.committed_tokens)],
  ];
  byId("glance").replaceChildren(...glance.map(([name, value]) => {
    const card = element("div");
    card.append(element("dt", name), element("dd", String(value)));
    return card;
  }));
  showWarnings(snapshot.warnings);
  showWorkers(snapshot.peers);
}

function showWarnings(warnings) {
  const lines = warnings.map((warning) => {
    const who = warning.peers.length ? ` (${warning.peers.slice(0, 4).map(shortId).join(", ")}` +
      `${warning.peers.length > 4 ? " ..." : ""})` : "";
    return `${warning.kind}: ${warning.message}${who}`;
  });
  const after = lines.length ? lines : ["none: the swarm is well"];
  const list = byId("warnings");
  if ([...list.children].map((item) => item.textContent).join("\n") !== after.join("\n")) {
    list.replaceChildren(...after.map((line) => element("li", line, lines.length ? "" : "none")));
  }
  announce(new Map(warnings.map((warning, index) => [`${warning.kind} ${warning.peers.join(" ")}`, lines[index]])));
}

// To a screen reader: warnings that were not there, once, however their seconds go on.
function announce(warnings) {
  const before = warned ?? new Map();
  const fresh = [...warnings].filter(([key]) => !before.has(key)).map(([, line]) => line);
  if (fresh.length) byId("announcement").textContent = fresh.join("; ");
  else if (before.size && !warnings.size) byId("announcement").textContent = "No warnings any more";
  warned = warnings;
}

function showWorkers(peers) {
  const rows = peers.filter((peer) => !(["left", "silent"].includes(peer.state) && peer.last_seen_s > 300));
  byId("workers").tBodies[0].replaceChildren(...rows.map((peer) => {
    const row = element("tr");
    const gone = ["left", "silent"].includes(peer.state);
    const id = element("td", shortId(peer.peer) + (peer.client_mode ? " (client)" : ""), "id");
    id.title = peer.peer;
    row.append(
      id, element("td", peer.state, `state ${peer.state}`), element("td", String(peer.round)),
      element("td", gone ? "" : `${Math.round(100 * peer.progress)} %`),
      element("td", gone ? "" : whole(peer.tokens_per_s)),
      element("td", peer.bandwidth_mbit === null ? "" : whole(peer.bandwidth_mbit)),
      element("td", peer.loss === null ? "" : peer.loss.toFixed(3)), element("td", peer.version),
      element("td", `${duration(peer.last_seen_s)} ago`),
    );
    return row;
  }));
}

function showTable(id, header, rows) {
  const table = byId(id);
  const head = element("thead"), body = element("tbody"), line = element("tr");
  line.append(...header.map((name) => { const cell = element("th", name); cell.scope = "col"; return cell; }));
  head.append(line);
  body.append(...rows.slice(-MAX_TABLE_ROWS).reverse().map((values) => {
    const row = element("tr");
    row.append(...values.map((value) => element("td", String(value))));
    return row;
  }));
  table.replaceChildren(head, body);
}

function layout(more) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink"), line = style.getPropertyValue("--line");
  const axis = { gridcolor: line, zerolinecolor: line, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 13 },
    margin: { l: 50, r: 10, t: 10, b: 40 }, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" }, ...more,
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

const OPTIONS = { responsive: true, displayModeBar: false };

function draw() {
  if (!latest) return;
  const measure = byId("measure").value, rounds = { title: { text: "round" } };
  Plotly.react("loss", lossTraces(run, measure), layout({ xaxis: rounds, yaxis: { title: { text: measure } } }), OPTIONS);
  Plotly.react("time", timeTraces(run), layout({ barmode: "stack", xaxis: rounds, yaxis: { title: { text: "seconds" } } }), OPTIONS);
  Plotly.react("bytes", bytesTraces(run), layout({ barmode: "group", xaxis: rounds, yaxis: { title: { text: "MB, all workers" } } }), OPTIONS);
  const [number, rows] = reducers(run);
  byId("map-note").textContent = number === null ? "no round has been told of yet" : `of the vector, in round ${number}`;
  Plotly.react("map", mapTraces(run, rows), layout({
    barmode: "stack", showlegend: false, xaxis: { title: { text: "share, %" }, range: [0, 100] }, yaxis: { showticklabels: false },
  }), OPTIONS);
  const timeline = timelineTraces(run, latest.time);
  byId("timeline").style.height = `${Math.max(12, 4 + 1.6 * run.states.size)}rem`;
  const times = { type: "date", tickangle: 0, nticks: Math.max(2, Math.floor(byId("timeline").clientWidth / 150)) };
  Plotly.react("timeline", timeline, layout({ barmode: "overlay", xaxis: times, yaxis: { type: "category" } }), OPTIONS);
  showTables(number, rows);
}

function showTables(number, rows) {
  const told = run.told(), fixed = (value) => value.toFixed(2);
  showTable("loss-table", ["round", "training, mean", "validation"], told.map(([at, records]) => {
    const losses = records.map((record) => record.loss).filter((loss) => loss !== null);
    const evaluated = run.evaluations.get(at);
    return [at, losses.length ? mean(losses).toFixed(3) : "", evaluated ? evaluated.loss.toFixed(3) : ""];
  }));
  showTable("time-table", ["round", ...PARTS.map(([, name]) => `${name}, s`)], told.map(([at, records]) => [
    at, ...PARTS.map(([field]) => fixed(mean(records.map((record) => record[field])))),
  ]));
  showTable("bytes-table", ["round", "sent, MB", "received, MB"], told.map(([at, records]) => [
    at, ...["sent_bytes", "received_bytes"].map((field) => fixed(records.reduce((sum, record) => sum + record[field], 0) / 1e6)),
  ]));
  showTable("map-table", ["worker", "share of the vector", "sent, MB", "received, MB"], number === null ? [] : rows.map(
    ([peer, share, sent, received]) => [shortId(peer), `${(100 * share).toFixed(0)} %`, fixed(sent / 1e6), fixed(received / 1e6)],
  ));
}

function take(news) {
  if (news.life !== life) { // another monitor: what it counts begins anew
    const isFirst = life === null;
    life = news.life;
    if (!isFirst) { location.reload(); return; }
  }
  count = news.count;
  news.events.forEach((event) => run.add(event));
  if (!news.snapshot) return;
  latest = news.snapshot;
  run.last = latest.workers ? latest.round + 1 : Infinity;
  showSnapshot(latest);
  if (news.events.length || Date.now() - drawn > 10000) {
    drawn = Date.now();
    draw();
  }
}

// A monitor that answers may still have stopped looking.
function showAge() {
  if (latest && Date.now() - lookedAt > OLD_MS) {
    byId("connection").textContent = `The last look at the swarm was ${duration((Date.now() - lookedAt) / 1000)} ago: what is ` +
      "shown here is old.";
  }
}

function follow() {
  const source = new EventSource(`api/stream?since=${count}`);
  source.onmessage = (message) => {
    lookedAt = Date.now();
    byId("connection").textContent = "";
    take(JSON.parse(message.data));
  };
  source.onerror = () => {
    byId("connection").textContent = "The monitor does not answer: what is shown here is old.";
    source.close();
    setTimeout(follow, 3000);
  };
}

byId("measure").addEventListener("change", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
setInterval(showAge, 5000);
follow();
