// Pieces that draw: elements from plain values, always by textContent, so that a name stays text.
const data = JSON.parse(document.getElementById('data').textContent);
const GIB = 2 ** 30;
const UNUSED = 'kept by the allocator', OUTSIDE = 'context and NCCL';
const byId = id => document.getElementById(id);

function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'style') Object.assign(element.style, value);
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...inside.filter(each => each !== null && each !== ''));
  return element;
}

const gib = bytes => {
  const value = bytes / GIB;
  return value >= 100 ? value.toFixed(0) : value >= 0.095 || value === 0 ? value.toFixed(1) : value.toFixed(3);
};
const size = bytes => bytes >= GIB / 10 ? `${gib(bytes)} GiB` : `${(bytes / 2 ** 20).toPrecision(3)} MiB`;

const least = 2 ** 20;  // of host memory that is told

// What a rank's bar is made of, from the bottom up.
function partsOf(rank) {
  const parts = data.categories.map(({ key, says }) => ({ key, says, bytes: rank.by_category[key] || 0 }));
  parts.push({ key: UNUSED, kind: 'slack', says: 'had once, and not in use at the peak', bytes: rank.reserved_bytes - rank.allocated_bytes });
  parts.push({ key: OUTSIDE, kind: 'outside', says: 'beside the allocator: context, libraries, communicators', bytes: rank.outside_bytes });
  return parts;
}

function swatch(part) {
  return make('span', { class: `swatch ${part.kind || ''}`, style: part.kind ? {} : { background: `var(--${part.key})` } });
}

// Bars of a panel: each device while they are few, else each kind of rank.
const MOST_BARS = 8;
function barsOf(option) {
  if (option.devices > MOST_BARS)
    return option.ranks.map(rank => ({ rank, name: rank.stands_for > 1 ? `${rank.rank}–${rank.rank + rank.stands_for - 1}` : `${rank.rank}` }));
  return option.ranks.flatMap(rank => Array.from({ length: rank.stands_for }, (_, place) => ({ rank, name: `${rank.rank + place}` })));
}

function worstOf(option) {
  return option.ranks.reduce((most, rank) => rank.device_bytes > most.device_bytes ? rank : most);
}

// The common scale of all panels. A device's memory is in it, unless all bars would be hardly seen beside it; so is what lies outside
// of the allocator.
function scaleOf(options) {
  const ranks = options.flatMap(option => option.ranks);
  const largest = key => Math.max(...ranks.map(rank => rank[key]), 1);
  const outside = largest('outside_bytes') <= largest('reserved_bytes');
  const most = largest(outside ? 'device_bytes' : 'reserved_bytes');
  const memory = data.device.memory_bytes;
  const limit = memory && most > memory / 8;
  const top = Math.max(most, limit ? memory : 0) * 1.1 / GIB;
  const unit = 10 ** Math.floor(Math.log10(top / 3));
  const step = [1, 2, 5, 10].map(times => times * unit).find(each => top / each <= 6);
  const ticks = Array.from({ length: Math.floor(top / step) + 1 }, (_, place) => place * step);
  const near = tick => limit && Math.abs(tick * GIB - memory) < top * GIB / 20;
  return { top: top * GIB, ticks: ticks.filter(tick => !near(tick)), digits: step < 1 ? Math.ceil(-Math.log10(step) - 1e-9) : 0, limit, outside };
}

function plot(option, scale, chosen, choose) {
  const place = bytes => `${100 * bytes / scale.top}%`;
  const box = make('div', { class: 'plot' });
  for (const tick of scale.ticks)
    box.append(make('div', { class: 'tick', style: { bottom: place(tick * GIB) } }, make('span', {}, tick.toFixed(scale.digits))));
  box.append(make('span', { class: 'ranks' }, 'rank'));
  const bars = barsOf(option);
  const every = Math.ceil(bars.length / MOST_BARS);
  const label = bar => bars.length > 4 ? String(bar.name).split('–')[0] : bar.name;  // the first rank, where there is no room
  const group = make('div', { class: 'bars', role: 'group', 'aria-label': `memory of ${option.devices} devices` });
  bars.forEach((bar, index) => group.append(drawBar(bar, { place, outside: scale.outside, pressed: index === chosen, label: index % every === 0 ? label(bar) : '',
    choose: () => choose(index) })));
  walk(group, chosen);
  box.append(group);
  box.append(make('span', { class: 'unit' }, 'GiB'), make('span', { class: 'key' }, ...keyOf(option, scale)));
  if (scale.limit)
    box.append(make('div', { class: 'limit', style: { bottom: place(data.device.memory_bytes) } }, make('span', {}, String(+gib(data.device.memory_bytes)))));
  return box;
}

// What the line is, and what is not in the plot.
function keyOf(option, scale) {
  const memory = data.device.memory_bytes, said = [];
  if (memory && scale.limit) said.push(make('i', {}), `memory of one ${data.device.kind}`);
  else if (memory) said.push(`the ${+gib(memory)} GiB of one ${data.device.kind} are far above`);
  if (!scale.outside) said.push(`${said.length ? ', ' : ''}${OUTSIDE}, ${size(worstOf(option).outside_bytes)}, not drawn`);
  return said;
}

function drawBar({ rank, name }, { place, outside, pressed, label, choose }) {
  const parts = partsOf(rank), memory = data.device.memory_bytes;
  const said = parts.filter(part => part.bytes > 0).map(part => `${part.key} ${size(part.bytes)}`).join(', ');
  const bar = make('button', { class: 'bar', type: 'button', 'aria-pressed': String(pressed),
    'aria-label': `rank ${name}: ${size(rank.device_bytes)}, ${rank.fit}; ${said}`, onclick: choose });
  let from = 0;
  for (const part of parts) {
    if (part.bytes <= 0 || (part.kind === 'outside' && !outside)) continue;
    bar.append(make('i', { class: part.kind || '', 'data-part': part.key, 'data-tip': `${part.key} ${size(part.bytes)}: ${part.says}`,
      style: { bottom: place(from), height: place(part.bytes), background: part.kind ? '' : `var(--${part.key})` } }));
    from += part.bytes;
  }
  if (memory && from > memory)
    bar.append(make('i', { class: 'over', style: { bottom: place(memory), height: place(from - memory) } }));
  if (label) bar.append(make('b', { style: { bottom: place(from) } }, gib(from)), make('em', {}, label));
  return bar;
}

// One stop of the Tab key for a row of buttons; arrows go from one to the next.
function walk(group, current, moved = () => {}) {
  const buttons = [...group.children];
  buttons.forEach((button, index) => {
    button.tabIndex = index === Math.max(0, current) ? 0 : -1;
    button.addEventListener('keydown', event => {
      const last = buttons.length - 1;
      const to = { ArrowLeft: index - 1, ArrowUp: index - 1, ArrowRight: index + 1, ArrowDown: index + 1, Home: 0, End: last }[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const next = buttons[(to + buttons.length) % buttons.length];
      buttons.forEach(each => { each.tabIndex = each === next ? 0 : -1; });
      next.focus();
      moved(next);
    });
  });
}

// What is known of one rank's peak: when it is, and what is large then.
function detail(option, bar) {
  const { rank } = bar, { phase, unit } = rank.moment;
  const box = make('div', { class: 'detail' });
  const who = option.ranks.length === 1 && option.devices > 1 ? 'every rank' : `rank ${bar.name}`;
  const where = phase + (unit ? ` of ${unit}` : '');
  const most = size(rank.allocated_bytes);
  box.append(make('p', {}, `Peak of ${who}: ${most} allocated, in ${where}, when ${rank.last.made_by} made ${size(rank.last.nbytes)}.`
    + (rank.host_bytes >= least ? ` In host memory: ${size(rank.host_bytes)}.` : '')));
  if (rank.advice.length) box.append(make('p', {}, `Try ${rank.advice[0]}${rank.advice[1] ? `, or ${rank.advice[1]}` : ''}.`));
  const rows = rank.largest.map(tensor => make('tr', {}, make('td', {}, size(tensor.nbytes)), make('td', {}, tensor.category),
    make('td', {}, `${tensor.name || tensor.made_by}, ${tensor.dtype} ${tensor.shape.join('×') || 'scalar'}`)));
  box.append(make('details', {}, make('summary', {}, `largest tensors then`), make('table', {}, make('tbody', {}, ...rows))));
  box.append(make('p', {}, make('code', { title: 'the words of this plan' }, option.words)));
  return box;
}

// The legend, which is the numbers: a row for each part, a column for each strategy.
function partsTable(shown) {
  const columns = shown.map(({ rank }) => partsOf(rank));
  const rows = columns[0].map((part, row) => ({ part, bytes: columns.map(column => column[row].bytes) })).filter(({ bytes }) => bytes.some(each => each > 0));
  const body = rows.map(({ part, bytes }) => make('tr', { 'data-part': part.key },
    make('th', { scope: 'row' }, swatch(part), part.key), make('td', {}, part.says), ...bytes.map(each => make('td', {}, each > 0 ? gib(each) : '–'))));
  body.push(make('tr', { class: 'sum' }, make('th', { scope: 'row' }, 'on the device'), make('td', {}, ''), ...shown.map(({ rank }) => make('td', {}, gib(rank.device_bytes)))));
  const head = make('tr', {}, make('th', { scope: 'col' }, 'GiB'), make('th', { scope: 'col' }, ''),
    ...shown.map(({ option, name, bar }) => make('th', { scope: 'col' }, option.ranks.length > 1 ? `${name}, rank ${bar.name}` : name)));
  return make('table', {}, make('thead', {}, head), make('tbody', {}, ...body));
}
