// What is chosen, and how that changes. A strategy that is wished for and can't be on so many devices comes back where it can.
const optionOf = (strategy, devices) => data.options.find(each => each.strategy === strategy && each.devices === devices);
const canBe = option => Boolean(option) && option.reason === null;
const nameOf = key => data.strategies.find(each => each.key === key).name;
const saysOf = key => data.strategies.find(each => each.key === key).says;
const state = begin();

// The textbook's pair, on all devices: copies beside all cut; or the person's own plan beside copies.
function begin() {
  const devices = [...data.devices].reverse().find(count => data.options.some(each => each.devices === count && canBe(each))) || data.devices[0];
  const can = key => canBe(optionOf(key, devices));
  const first = [...(data.said ? ['own'] : []), 'zero3', 'zero2', ...data.strategies.map(each => each.key)].find(can) || data.strategies[0].key;
  const other = ['copies', 'zero1', 'tensor'].find(key => key !== first && can(key));
  return { devices, wish: first, pinned: other ? { strategy: other, devices } : null, bars: {} };
}

function current() {
  const wished = optionOf(state.wish, state.devices);
  return canBe(wished) ? wished : data.options.find(each => each.devices === state.devices && canBe(each)) || null;
}

function pinned() {
  if (!state.pinned) return null;
  const here = optionOf(state.pinned.strategy, state.devices);
  return canBe(here) ? here : optionOf(state.pinned.strategy, state.pinned.devices);
}

function shownNow() {
  const now = current(), beside = pinned();
  return [beside !== now ? beside : null, now].filter(Boolean).map(option => {
    const bars = barsOf(option), worst = bars.findIndex(bar => bar.rank === worstOf(option));
    const key = `${option.strategy} ${option.devices}`;
    const chosen = state.bars[key] ?? worst;
    return { option, key, chosen, bar: bars[chosen], rank: bars[chosen].rank, name: nameOf(option.strategy) };
  });
}

function radios(box, items, checked, choose) {
  const buttons = items.map(({ value, name, says, reason }) => make('button', { type: 'button', role: 'radio', 'aria-checked': String(value === checked),
    'aria-disabled': reason ? 'true' : null, 'data-value': String(value), 'data-name': name, 'data-reason': reason || '', 'data-says': says || '', 'aria-describedby': 'why' }, name));
  const pick = button => {
    tell(button.dataset);
    if (button.getAttribute('aria-disabled') !== 'true') choose(items[buttons.indexOf(button)].value);
  };
  for (const button of buttons) {
    button.addEventListener('click', () => pick(button));
    button.addEventListener('focus', () => tell(button.dataset));
    button.addEventListener('pointerenter', () => tell(button.dataset));
    button.addEventListener('pointerleave', () => tell({}));
  }
  box.replaceChildren(...buttons);
  walk(box, items.findIndex(item => item.value === checked), pick);
}

// The line below the buttons: why a choice can't be, or what it is.
function tell({ name, reason, says }) {
  const now = current();
  byId('why').textContent = reason ? `${name} can't be chosen: ${reason}` : says ? `${name}: ${says}`
    : now ? `${nameOf(now.strategy)}: ${now.plan}` : '';
}

function reasonOf(strategy) {
  const option = optionOf(strategy, state.devices);
  return canBe(option) ? '' : option ? option.reason : 'not simulated';
}

function reasonOfCount(count) {
  const there = data.options.filter(each => each.devices === count);
  return there.some(canBe) ? '' : there.at(-1)?.reason || 'nothing can be on so many devices';
}

function drawControls() {
  const focused = document.activeElement, inside = focused?.parentElement?.id, value = focused?.dataset?.value;
  const now = current();
  radios(byId('strategies'), data.strategies.map(({ key, name, says }) => ({ value: key, name, says, reason: reasonOf(key) })), now?.strategy,
    wish => { state.wish = wish; draw(); });
  radios(byId('devices'), data.devices.map(count => ({ value: count, name: String(count), reason: reasonOfCount(count) })), state.devices,
    devices => { state.devices = devices; draw(); });
  if (inside === 'strategies' || inside === 'devices') byId(inside).querySelector(`[data-value="${CSS.escape(value)}"]`)?.focus();
  else tell({});
}

function verdict(option) {
  const worst = worstOf(option), memory = data.device.memory_bytes;
  const kind = { fits: 'fits', tight: 'tight' }[option.fit] || 'not';
  const spare = worst.margin_bytes;
  const rest = memory == null ? `${size(worst.device_bytes)} a rank` : spare >= 0 ? `${size(worst.device_bytes)}, ${size(spare)} to spare` : `${size(worst.device_bytes)}, ${size(-spare)} too many`;
  return make('p', { class: `verdict ${kind}` }, make('b', {}, memory == null ? 'Host memory' : option.fit.replace(/^./, letter => letter.toUpperCase())), `: ${rest}`);
}

function panel(each, scale, count) {
  const { option, chosen, key, bar, name } = each;
  const isPinned = count > 1 && option === pinned();
  const pin = make('button', { type: 'button', class: 'pin', onclick: () => {
    state.pinned = isPinned ? null : { strategy: option.strategy, devices: option.devices };
    draw();
    document.querySelector('.pin')?.focus();
  } }, isPinned ? 'Unpin' : count > 1 ? 'Pin instead' : option === pinned() ? 'Pinned: now choose another' : 'Pin to compare');
  pin.setAttribute('aria-label', `${pin.textContent}: ${name}`);
  const head = make('header', {}, make('h3', {}, name, make('small', {}, ` ${option.cluster}`)), pin);
  const choose = index => {
    state.bars[key] = index;
    draw();
    document.querySelectorAll('.panel')[each.place]?.querySelectorAll('.bar')[index]?.focus();
  };
  return make('article', { class: 'panel', 'aria-label': name }, head, make('p', { class: 'says' }, saysOf(option.strategy)), verdict(option),
    plot(option, scale, chosen, choose), detail(option, bar));
}

function draw() {
  const shown = shownNow();
  shown.forEach((each, place) => { each.place = place; });
  drawControls();
  byId('memory').hidden = !shown.length;
  if (!shown.length) return;
  const scale = scaleOf(shown.map(({ option }) => option));
  const open = [...document.querySelectorAll('.panel details')].some(each => each.open);
  byId('panels').className = shown.length > 1 ? '' : 'single';
  byId('panels').replaceChildren(...shown.map(each => panel(each, scale, shown.length)));
  document.querySelectorAll('.panel details').forEach(each => { each.open = open; });
  byId('parts').replaceChildren(partsTable(shown));
  drawTime(shown);
}

// A part that is pointed at, in a bar or in the table, stands out everywhere.
const float = make('div', { id: 'float', hidden: true });
document.body.append(float);

function point(event) {
  const part = event.target.closest?.('[data-part]')?.dataset.part;
  const tip = event.target.closest?.('[data-tip]')?.dataset.tip;
  document.querySelectorAll('.hot').forEach(each => each.classList.remove('hot'));
  if (part) {
    byId('memory').dataset.hot = part;
    document.querySelectorAll('[data-part]').forEach(each => each.classList.toggle('hot', each.dataset.part === part));
  } else delete byId('memory').dataset.hot;
  float.hidden = !tip;
  if (!tip) return;
  float.textContent = tip;
  const { offsetWidth: width, offsetHeight: height } = float;
  float.style.left = `${Math.max(4, Math.min(innerWidth - width - 4, event.clientX + 14))}px`;
  float.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 8 : event.clientY + 18}px`;
}

document.addEventListener('pointermove', point);
document.addEventListener('pointerleave', point);
document.addEventListener('keydown', event => { if (event.key === 'Escape') float.hidden = true; });
byId('controls').hidden = false;
draw();
