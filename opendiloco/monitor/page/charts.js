"use strict";
// What the charts show, from the events of the history. Labels are ends of peer ids and numbers, never others' words.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999"];
const PARTS = [
  ["inner_s", "training"], ["wait_s", "waiting for others"], ["rendezvous_s", "rendezvous"],
  ["allreduce_s", "all-reduce"], ["outer_s", "outer step"],
];
const STATES = {
  training: "#009e73", averaging: "#0072b2", following: "#e69f00", late: "#e69f00", left: "#999999", silent: "#d55e00",
};
const VALIDATION = "#d55e00";
const WORKERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c564b", "#999999"]; // of their own
const MOST_LINES = 12;
const MOST_STATES = 2000; // of a peer

const shortId = (peer) => peer.slice(-10);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// What is known of a run: rounds by number and peer, evaluations by round, states by peer.
class Run {
  constructor() {
    this.rounds = new Map();
    this.evaluations = new Map();
    this.states = new Map();
    this.places = new Map(); // by peer, in the order in which they were seen
    this.last = Infinity; // round that is shown: there can be no later one, whatever somebody tells
  }

  add(event) {
    if (!this.places.has(event.peer)) this.places.set(event.peer, this.places.size);
    if (event.kind === "round") {
      const { round } = event.told;
      if (!this.rounds.has(round)) this.rounds.set(round, new Map());
      this.rounds.get(round).set(event.peer, event.told);
    } else if (event.kind === "evaluation") {
      const known = this.evaluations.get(event.told.round);
      if (!known || event.told.tokens >= known.tokens) this.evaluations.set(event.told.round, event.told);
    } else if (event.kind === "state") {
      if (!this.states.has(event.peer)) this.states.set(event.peer, []);
      const states = this.states.get(event.peer);
      states.push(event);
      if (states.length > MOST_STATES) states.shift();
    }
  }

  // The same in every chart.
  colour(peer) { return WORKERS[(this.places.get(peer) ?? 0) % WORKERS.length]; }

  numbers() { return this.upToLast(this.rounds); }

  upToLast(byRound) { return [...byRound.keys()].filter((round) => round <= this.last).sort((a, b) => a - b); }

  // Of each round [number, workers' records of those who took part].
  told() {
    return this.numbers().map((number) => {
      const records = [...this.rounds.get(number).values()];
      const voters = records.filter((record) => record.has_vote);
      return [number, voters.length ? voters : records];
    });
  }
}

function lossTraces(run, measure) {
  const shown = (loss) => (measure === "perplexity" ? Math.exp(loss) : loss);
  const byPeer = new Map();
  for (const number of run.numbers()) {
    for (const [peer, told] of run.rounds.get(number)) {
      if (told.loss === null || told.loss === undefined) continue;
      if (!byPeer.has(peer)) byPeer.set(peer, { x: [], y: [] });
      byPeer.get(peer).x.push(number);
      byPeer.get(peer).y.push(shown(told.loss));
    }
  }
  const peers = [...byPeer.keys()].sort((a, b) => byPeer.get(b).x.length - byPeer.get(a).x.length).slice(0, MOST_LINES);
  const traces = peers.map((peer) => ({
    ...byPeer.get(peer), name: shortId(peer), mode: "lines", line: { width: 1, color: run.colour(peer) },
  }));
  const evaluated = run.upToLast(run.evaluations);
  traces.push({
    x: evaluated, y: evaluated.map((round) => shown(run.evaluations.get(round).loss)), name: "validation",
    mode: "lines+markers", line: { width: 3, color: VALIDATION },
  });
  return traces;
}

function timeTraces(run) {
  const told = run.told();
  return PARTS.map(([field, name], index) => ({
    x: told.map(([number]) => number), y: told.map(([, records]) => mean(records.map((record) => record[field]))),
    name, type: "bar", marker: { color: COLOURS[[2, 1, 4, 0, 3][index]] },
  }));
}

function bytesTraces(run) {
  const told = run.told();
  return [["sent_bytes", "sent", COLOURS[0]], ["received_bytes", "received", COLOURS[1]]].map(([field, name, color]) => ({
    x: told.map(([number]) => number),
    y: told.map(([, records]) => records.reduce((sum, record) => sum + record[field], 0) / 1e6),
    name, type: "bar", marker: { color },
  }));
}

// The newest round of which somebody who reduced a slice has told: [number, [[peer, share, sent, received]]].
function reducers(run) {
  for (const number of run.numbers().reverse()) {
    const rows = [...run.rounds.get(number)].map(([peer, told]) => [peer, told.share, told.sent_bytes, told.received_bytes]);
    if (rows.some((row) => row[1] > 0)) return [number, rows.sort((a, b) => (a[0] < b[0] ? -1 : 1))];
  }
  return [null, []];
}

function mapTraces(run, rows) {
  return rows.map(([peer, share]) => ({
    x: [100 * share], y: ["vector"], name: shortId(peer), type: "bar", orientation: "h",
    text: [`${shortId(peer)} ${(100 * share).toFixed(0)} %`], textposition: "inside", hoverinfo: "text",
    marker: { color: run.colour(peer), line: { width: 1, color: "#ffffff" } },
  }));
}

function timelineTraces(run, now) {
  const spans = Object.fromEntries(Object.keys(STATES).map((state) => [state, { x: [], y: [], base: [] }]));
  for (const [peer, events] of run.states) {
    events.forEach((event, index) => {
      const until = index + 1 < events.length ? events[index + 1].time : now;
      const span = spans[event.state];
      if (!span || event.state === "left") return;
      span.base.push(event.time * 1000);
      span.x.push(Math.max(0, until - event.time) * 1000);
      span.y.push(shortId(peer));
    });
  }
  return Object.entries(spans).filter(([, span]) => span.x.length).map(([state, span]) => ({
    ...span, name: state, type: "bar", orientation: "h", marker: { color: STATES[state] },
    hovertemplate: `%{y}: ${state}<extra></extra>`,
  }));
}
