// Where the children of a block stand: layers by longest path, long edges led through the layers
// between, an order with few crossings, and each node as near as possible to what it reads.
const GAP_X = 26, GAP_Y = 34, LANE = 16;

function arranged(sizes, links) {
  const layer = sizes.map(() => 0);
  const real = links.filter(([s, t]) => s < t);
  for (const [s, t] of [...real].sort((a, b) => a[1] - b[1])) layer[t] = Math.max(layer[t], layer[s] + 1);
  // A node without anything to read stands just above its first reader.
  const reads = new Set(real.map(([, t]) => t));
  for (let n = sizes.length - 1; n >= 0; n--) {
    if (reads.has(n)) continue;
    const below = real.filter(([s]) => s === n).map(([, t]) => layer[t]);
    if (below.length) layer[n] = Math.min(...below) - 1;
  }
  const nodes = sizes.map(([width, height], n) => ({ n, width, height, layer: layer[n], up: [], down: [] }));
  const chains = links.map(([s, t]) => chain(nodes, s, t));
  const layers = [];
  for (const node of nodes) (layers[node.layer] ||= []).push(node);
  for (let k = 0; k < layers.length; k++) layers[k] ||= [];
  untangle(layers);
  place(layers);
  let y = 0;
  for (const row of layers) {
    const height = Math.max(0, ...row.map((node) => node.height));
    for (const node of row) {
      if (node.lane) node.height = height;
      node.y = y + (height - node.height) / 2;
    }
    y += height + GAP_Y;
  }
  const left = Math.min(0, ...nodes.map((node) => node.x));
  for (const node of nodes) node.x -= left;
  const width = Math.max(0, ...nodes.map((node) => node.x + node.width));
  return { nodes: nodes.slice(0, sizes.length), chains, ports: ports(chains), width, height: Math.max(0, y - GAP_Y) };
}

function chain(nodes, s, t) {
  if (s >= t) return null;
  let last = nodes[s];
  const found = [last];
  for (let k = nodes[s].layer + 1; k < nodes[t].layer; k++) {
    const lane = { width: LANE, height: 0, layer: k, up: [], down: [], lane: true };
    nodes.push(lane); joinUp(last, lane); found.push(lane); last = lane;
  }
  joinUp(last, nodes[t]); found.push(nodes[t]);
  return found;
}
function joinUp(above, below) { above.down.push(below); below.up.push(above); }

function untangle(layers) {
  layers.forEach((row) => row.forEach((node, k) => { node.at = k; }));
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    const rows = down ? layers.slice(1) : layers.slice(0, -1).reverse();
    for (const row of rows) {
      for (const node of row) {
        const near = down ? node.up : node.down;
        node.want = near.length ? near.reduce((sum, other) => sum + other.at, 0) / near.length : node.at;
      }
      row.sort((a, b) => a.want - b.want || a.at - b.at);
      row.forEach((node, k) => { node.at = k; });
    }
  }
}

function place(layers) {
  const centre = (node) => node.x + node.width / 2;
  for (const row of layers) {
    let x = -row.reduce((sum, node) => sum + node.width + GAP_X, -GAP_X) / 2;
    for (const node of row) { node.x = x; x += node.width + GAP_X; }
  }
  for (let sweep = 0; sweep < 8; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? layers : [...layers].reverse()) {
      const want = row.map((node) => {
        const near = (down ? node.up : node.down).length ? (down ? node.up : node.down) : (down ? node.down : node.up);
        if (!near.length) return node.x;
        return near.reduce((sum, other) => sum + centre(other), 0) / near.length - node.width / 2;
      });
      settle(row, want);
    }
  }
}

// Positions in order without overlap, with the least sum of squared distances from those wanted:
// neighbours that collide are moved as one cluster to the mean of what they want.
function settle(row, want) {
  const clusters = [];
  row.forEach((node, k) => {
    clusters.push({ first: k, size: 1, wants: want[k], width: node.width + GAP_X });
    while (clusters.length > 1) {
      const b = clusters[clusters.length - 1], a = clusters[clusters.length - 2];
      if (a.wants / a.size + a.width <= b.wants / b.size) break;
      clusters.splice(-2, 2, { first: a.first, size: a.size + b.size, wants: a.wants + b.wants - b.size * a.width, width: a.width + b.width });
    }
  });
  for (const cluster of clusters) {
    let x = cluster.wants / cluster.size;
    for (let k = cluster.first; k < cluster.first + cluster.size; k++) { row[k].x = x; x += row[k].width + GAP_X; }
  }
}

// What several edges lead to, they reach side by side.
function ports(chains) {
  const into = new Map();
  chains.forEach((stops, k) => { if (stops) { const end = stops[stops.length - 1]; into.set(end, [...(into.get(end) || []), k]); } });
  const shift = chains.map(() => 0);
  for (const [end, found] of into) {
    const from = (k) => { const node = chains[k][chains[k].length - 2]; return node.x + node.width / 2; };
    found.sort((a, b) => from(a) - from(b));
    const room = Math.min(56, 0.7 * end.width / found.length);
    found.forEach((k, i) => { shift[k] = (i - (found.length - 1) / 2) * room; });
  }
  return shift;
}
