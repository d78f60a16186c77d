// Places the steps of a pipeline in layers, from the request to the response. No element of the page is known here.
//
// Layers by the longest path, order within a layer by the mean of the neighbours (Sugiyama, Tagawa and Toda, 1981), places by least
// squares with the distances kept (pool adjacent violators).

const REQUEST = -1;
const RESPONSE = -2;
const SWEEPS = 6;
// More bends than this cost more time than they help: long edges are then drawn straight.
const MAX_BENDS = 2000;
const BEND_SIZE = 10;
const GAP = 18;

/** Edges of a pipeline as [{from, to, tensors, isCondition}]; REQUEST and RESPONSE stand for the two ends. */
export function edgesOf(pipeline) {
  const producers = new Map(pipeline.inputs.map((tensor) => [tensor, REQUEST]));
  pipeline.steps.forEach((step, index) => Object.values(step.outputs).forEach((tensor) => producers.set(tensor, index)));
  const edges = new Map();
  const add = (tensor, to, isCondition) => {
    const from = producers.get(tensor);
    if (from === undefined || from === to) return;
    const key = `${from} ${to}`;
    const edge = edges.get(key) ?? { from, to, tensors: [], isCondition: true };
    if (!edge.tensors.includes(tensor)) edge.tensors.push(tensor);
    edge.isCondition &&= isCondition;
    edges.set(key, edge);
  };
  pipeline.steps.forEach((step, index) => {
    Object.values(step.inputs).forEach((tensor) => add(tensor, index, false));
    step.condition.forEach((tensor) => add(tensor, index, true));
  });
  Object.values(pipeline.outputs).forEach((tensor) => add(tensor, RESPONSE, false));
  return [...edges.values()];
}

/**
 * Places of the steps and the ways of the edges between them.
 *
 * `sizes` has {along, across} in pixels by index of the step, and of both ends; `gap` is the space between two layers. "along" goes from
 * the request to the response, "across" is the other direction. Gives {nodes: Map of index to {along, across, layer}, edges: [{from, to,
 * tensors, isCondition, points: [[along, across], ...]}], along, across}; a place is the corner of a node with the lowest numbers.
 */
export function placed(pipeline, sizes, gap) {
  const edges = edgesOf(pipeline);
  const layers = layersOf(pipeline.steps.length, edges);
  const { rows, links, chains } = withBends(layers, edges);
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) sortRows(rows, links, sweep % 2 === 0);
  const sizeOf = (node) => sizes.get(node)?.across ?? BEND_SIZE;
  const centres = centresOf(rows, links, sizeOf);
  const starts = [];
  let along = 0;
  rows.forEach((row, layer) => {
    starts[layer] = along;
    along += Math.max(...row.map((node) => sizes.get(node)?.along ?? 0)) + gap;
  });
  const nodes = new Map([...sizes.keys()].map((node) =>
    [node, { along: starts[layers.get(node)], across: centres.get(node) - sizeOf(node) / 2, layer: layers.get(node) }]));
  // An edge passes a layer straight, beside its nodes.
  const passing = (bend, layer) => [[starts[layer], centres.get(bend)], [(starts[layer + 1] ?? along) - gap, centres.get(bend)]];
  const drawnEdges = edges.map((edge, place) => {
    const begin = [nodes.get(edge.from).along + sizes.get(edge.from).along, centres.get(edge.from)];
    const bends = chains[place].flatMap((bend, number) => passing(bend, layers.get(edge.from) + 1 + number));
    return { ...edge, points: [begin, ...bends, [nodes.get(edge.to).along, centres.get(edge.to)]] };
  });
  const ends = rows.flat().map((node) => centres.get(node) + sizeOf(node) / 2);
  return { nodes, edges: drawnEdges, along: along - gap, across: Math.max(...ends) };
}

export const ENDS = { REQUEST, RESPONSE };

/** Layer of each node: the number of edges on the longest path from the request. */
function layersOf(count, edges) {
  const indices = Array.from({ length: count }, (_, index) => index);
  const layers = new Map([[REQUEST, 0], ...indices.map((index) => [index, 1])]);
  const waits = new Map(indices.map((index) => [index, 0]));
  const followers = new Map([REQUEST, ...indices].map((index) => [index, []]));
  for (const { from, to } of edges) {
    if (to === RESPONSE) continue;
    followers.get(from).push(to);
    if (from !== REQUEST) waits.set(to, waits.get(to) + 1);
  }
  const ready = indices.filter((index) => waits.get(index) === 0);
  for (let place = 0; place < ready.length; place += 1) {
    for (const to of followers.get(ready[place])) {
      layers.set(to, Math.max(layers.get(to), layers.get(ready[place]) + 1));
      waits.set(to, waits.get(to) - 1);
      if (waits.get(to) === 0) ready.push(to);
    }
  }
  layers.set(RESPONSE, Math.max(...layers.values()) + 1);
  return layers;
}

/** Rows of nodes by layer with a bend in each layer that an edge passes; links [from, to] between neighbours; bends of each edge. */
function withBends(layers, edges) {
  const rows = Array.from({ length: layers.get(RESPONSE) + 1 }, () => []);
  for (const [node, layer] of layers) rows[layer].push(node);
  const links = [];
  let left = MAX_BENDS;
  const chains = edges.map(({ from, to }, place) => {
    const passed = layers.get(to) - layers.get(from) - 1;
    if (passed > left) return [];
    left -= passed;
    const chain = Array.from({ length: passed }, (_, number) => `${place} ${number}`);
    chain.forEach((bend, number) => rows[layers.get(from) + 1 + number].push(bend));
    const way = [from, ...chain, to];
    way.slice(1).forEach((node, number) => links.push([way[number], node]));
    return chain;
  });
  return { rows, links, chains };
}

function neighboursOf(links, forward) {
  const neighbours = new Map();
  for (const [from, to] of links) {
    const [node, other] = forward ? [to, from] : [from, to];
    if (!neighbours.has(node)) neighbours.set(node, []);
    neighbours.get(node).push(other);
  }
  return neighbours;
}

/** Sort each row by the mean place of the neighbours in the row before it, or behind it. */
function sortRows(rows, links, forward) {
  const neighbours = neighboursOf(links, forward);
  const places = new Map();
  const number = (row) => row.forEach((node, place) => places.set(node, (place + 0.5) / row.length));
  rows.forEach(number);
  for (const row of forward ? rows : [...rows].reverse()) {
    const means = new Map(row.map((node) => [node, mean((neighbours.get(node) ?? []).map((each) => places.get(each))) ?? places.get(node)]));
    row.sort((a, b) => means.get(a) - means.get(b));
    number(row);
  }
}

/** Centre of each node across the layers: near those of its neighbours, in the order of its row. */
function centresOf(rows, links, sizeOf) {
  const centres = new Map();
  for (const row of rows) {
    let end = 0;
    for (const node of row) {
      centres.set(node, end + sizeOf(node) / 2);
      end += sizeOf(node) + GAP;
    }
  }
  for (let sweep = 0; sweep < SWEEPS; sweep += 1) {
    const neighbours = neighboursOf(links, sweep % 2 === 0);
    for (const row of sweep % 2 === 0 ? rows : [...rows].reverse()) {
      const wanted = row.map((node) => mean((neighbours.get(node) ?? []).map((each) => centres.get(each))) ?? centres.get(node));
      spaced(row, wanted, sizeOf).forEach((centre, place) => centres.set(row[place], centre));
    }
  }
  const first = Math.min(...rows.flat().map((node) => centres.get(node) - sizeOf(node) / 2));
  for (const [node, centre] of centres) centres.set(node, centre - first);
  return centres;
}

/** The centres nearest to the wanted ones by least squares that keep the order and the distances of a row. */
function spaced(row, wanted, sizeOf) {
  const offsets = [];
  row.forEach((node, place) => offsets.push(place === 0 ? 0 : offsets[place - 1] + (sizeOf(row[place - 1]) + sizeOf(node)) / 2 + GAP));
  const blocks = [];
  wanted.forEach((value, place) => {
    blocks.push({ sum: value - offsets[place], count: 1 });
    while (blocks.length > 1 && blocks.at(-1).sum / blocks.at(-1).count < blocks.at(-2).sum / blocks.at(-2).count) {
      const { sum, count } = blocks.pop();
      blocks.at(-1).sum += sum;
      blocks.at(-1).count += count;
    }
  });
  return blocks.flatMap(({ sum, count }) => Array(count).fill(sum / count)).map((value, place) => value + offsets[place]);
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}
