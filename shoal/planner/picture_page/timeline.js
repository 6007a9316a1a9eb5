// Time of a step: numbers, the lanes of one rank, and a pipeline's schedule. Drawn only for options that have it.
const LANES = ['compute', 'communication', 'host'];
const PHASES = ['forward', 'backward', 'recompute', 'reduce', 'update'];
const seconds = value => value >= 1 ? `${value.toFixed(2)} s` : value >= 1e-3 ? `${(value * 1e3).toPrecision(3)} ms` : `${(value * 1e6).toPrecision(3)} µs`;
const hasTime = option => Boolean(option.step) || option.timeline.length > 0;

function timePanel({ option, name }, longest) {
  const box = make('div', { class: 'time' });
  box.append(make('h3', {}, name, make('small', {}, ` ${option.cluster}`)));
  if (option.step) box.append(facts(option.step));
  if (!option.timeline.length) {
    box.append(make('p', { class: 'soft' }, hasTime(option) ? '' : 'Its time is not known.'));
    return box;
  }
  const ranks = [...new Set(option.timeline.map(event => event.rank))].sort((one, other) => one - other);
  box.append(phaseKeys(option.timeline));
  if (ranks.length > 1) box.append(schedule(option.timeline, ranks, longest));
  box.append(lanesOf(option.timeline.filter(event => event.rank === ranks[0]), ranks[0], longest));
  return box;
}

function facts(step) {
  const list = [['a step', `${seconds(step.seconds)} (${seconds(step.low_s)} to ${seconds(step.high_s)})`]];
  if (step.units_per_s != null) list.push([`${step.unit} a second`, Math.round(step.units_per_s).toLocaleString('en')]);
  if (step.mfu != null) list.push(['MFU', `${(100 * step.mfu).toFixed(1)} %`]);
  if (step.bound_by) list.push(['bound by', step.bound_by]);
  if (step.exposed_s) list.push(['waits for communication', seconds(step.exposed_s)]);
  if (step.idle_s) list.push(['idle', seconds(step.idle_s)]);
  for (const [name, value] of Object.entries(step.parts || {})) list.push([name, seconds(value)]);
  return make('dl', { class: 'facts' }, ...list.map(([name, value]) => make('div', {}, make('dt', {}, name), make('dd', {}, value))));
}

function phaseKeys(events) {
  const there = PHASES.filter(phase => events.some(event => event.phase === phase));
  return make('div', { class: 'keys' }, ...there.map(phase =>
    make('span', {}, make('span', { class: 'swatch', style: { background: `var(--${phase})` } }), phase)));
}

function schedule(events, ranks, longest) {
  const box = make('div', { role: 'group', 'aria-label': 'schedule of the pipeline' }, make('h4', {}, 'Schedule: ranks over time, with the numbers of micro-batches'));
  for (const rank of ranks)
    box.append(lane(`rank ${rank}`, events.filter(event => event.rank === rank && event.lane === 'compute'), longest, true));
  box.append(scaleLine(longest));
  return box;
}

function lanesOf(events, rank, longest) {
  const box = make('div', { role: 'group', 'aria-label': `lanes of rank ${rank}` }, make('h4', {}, `What rank ${rank} does at a time`));
  for (const name of LANES) {
    const inside = events.filter(event => event.lane === name);
    if (inside.length) box.append(lane({ communication: 'comm.' }[name] || name, inside, longest, false));
  }
  box.append(scaleLine(longest));
  return box;
}

function lane(name, events, longest, numbered) {
  const row = make('div', { class: numbered ? 'numbered' : null });
  for (const event of events) {
    const width = 100 * (event.end_s - event.begin_s) / longest;
    const number = event.micro_batch == null ? '' : ` of micro-batch ${event.micro_batch}`;
    row.append(make('i', { style: { left: `${100 * event.begin_s / longest}%`, width: `${width}%`, background: `var(--${PHASES.includes(event.phase) ? event.phase : 'other'})` },
      'data-tip': `${event.name}${number}: ${seconds(event.end_s - event.begin_s)}, from ${seconds(event.begin_s)}` },
    numbered && event.micro_batch != null && width > 1.8 ? String(event.micro_batch) : ''));
  }
  const busy = events.reduce((sum, event) => sum + event.end_s - event.begin_s, 0);
  row.setAttribute('role', 'img');
  row.setAttribute('aria-label', `${name}: busy for ${seconds(busy)} of ${seconds(longest)}`);
  return make('div', { class: 'lane' }, make('span', {}, name), row);
}

const scaleLine = longest => make('div', { class: 'scale' }, make('span', {}, '0'), make('span', {}, seconds(longest)));

function drawTime(shown) {
  const timed = shown.filter(({ option }) => hasTime(option));
  byId('time').hidden = !timed.length;
  if (!timed.length) return;
  const ends = timed.flatMap(({ option }) => [option.step ? option.step.seconds : 0, ...option.timeline.map(event => event.end_s)]);
  const longest = ends.reduce((most, end) => Math.max(most, end), 1e-9);
  byId('times').className = shown.length > 1 ? '' : 'single';
  byId('times').replaceChildren(...shown.map(each => timePanel(each, longest)));
}
