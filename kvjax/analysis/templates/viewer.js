// Shows which tokens a cache holds, in one layer and KV head or in several. `Viewer.data` describes the data.
(() => {
  "use strict";
  const root = document.currentScript.closest(".kvjax-viewer");
  const part = (role) => root.querySelector(`[data-role="${role}"]`);
  const data = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const blobs = data.blobs.map((text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0)));
  const ALL = "all", ROW = 6; // pixels of a head in the map
  const full = data.full === null ? null : data.caches[data.full];
  const number = (count) => count.toLocaleString("en-US");
  const choice = { cache: data.caches.length - 1, layer: ALL, head: ALL, shade: "" };

  const fill = (role, options) => part(role).replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  const makeSpans = (place, texts) => {
    const spans = texts.map((text) => {
      const span = document.createElement("span");
      span.textContent = text || "\u00b7"; // of a part of a character
      return span;
    });
    place.replaceChildren(...spans);
    return spans;
  };

  // The positions that one head holds, each with its shade from 0 to 1; null if there is no such statistic.
  function heldBy(cache, layer, head, statistic) {
    const bits = blobs[cache.held[layer][head]], shades = blobs[cache.shades[layer][head][statistic]];
    const held = new Map();
    for (let position = 0; position < cache.length; position++) {
      if ((bits[position >> 3] >> (position & 7)) & 1) held.set(position, shades ? shades[held.size] / 255 : null);
    }
    return held;
  }

  function chosenHeads() {
    const layers = choice.layer === ALL ? data.layers.keys() : [data.layers.indexOf(Number(choice.layer))];
    const heads = choice.head === ALL ? [...Array(data.heads).keys()] : [Number(choice.head)];
    return [...layers].flatMap((layer) => heads.map((head) => [layer, head]));
  }

  // The same of all chosen heads: the shade is the share of them that holds the token.
  function heldByAll(cache, chosen) {
    const counts = new Map();
    for (const [layer, head] of chosen) {
      for (const position of heldBy(cache, layer, head).keys()) counts.set(position, (counts.get(position) || 0) + 1);
    }
    return new Map([...counts].map(([position, count]) => [position, count / chosen.length]));
  }

  function paint(span, position, held, length, explain) {
    const shade = held.get(position);
    span.className = position >= length ? "unseen" : held.has(position) ? "held" : "evicted";
    span.style.setProperty("--shade", shade ?? 0.5);
    const about = position >= length ? "not seen by the cache" : held.has(position) ? explain(shade) : "evicted";
    span.title = `token ${number(position)}: ${about}`;
  }

  // A row of pixels for each layer and head, a column for each token.
  function drawMap(cache, chosen) {
    const canvas = part("map"), rows = data.layers.length * data.heads, marked = new Set(chosen.map(String));
    canvas.width = cache.length;
    canvas.height = rows;
    canvas.style.height = `${rows * (rows > 64 ? 2 : ROW)}px`;
    canvas.setAttribute("aria-label", `Map of the tokens held by ${cache.name}: a row per layer and KV head`);
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, rows);
    const color = getComputedStyle(root).getPropertyValue("--accent").split(",").map(Number);
    data.layers.forEach((_, layer) => {
      for (let head = 0; head < data.heads; head++) {
        const pixel = [...color, marked.has(String([layer, head])) ? 230 : 75];
        const start = (layer * data.heads + head) * canvas.width;
        for (const position of heldBy(cache, layer, head).keys()) image.data.set(pixel, 4 * (start + position));
      }
    });
    context.putImageData(image, 0, 0);
  }

  const promptSpans = makeSpans(part("prompt"), data.prompt);
  fill("cache", data.caches.map((cache, place) => [place, cache.name]));
  fill("layer", [[ALL, "all"], ...data.layers.map((layer) => [layer, layer])]);
  fill("head", [[ALL, "all"], ...Array.from({ length: data.heads }, (_, head) => [head, head])]);

  function show() {
    const cache = data.caches[choice.cache], chosen = chosenHeads(), one = chosen.length === 1;
    const known = one ? Object.keys(cache.shades[chosen[0][0]][chosen[0][1]]) : [];
    const statistic = known.includes(choice.shade) ? choice.shade : known[0];
    const words = cache.statistics[statistic];
    fill("shade", one ? known.map((name) => [name, cache.statistics[name]]) : [["", "number of heads"]]);
    if (one && !known.length) fill("shade", [["", "none: the policy keeps no statistic"]]);
    for (const role of ["cache", "layer", "head"]) part(role).value = choice[role];
    part("shade").value = statistic ?? "";
    part("shade").disabled = known.length < 2;

    const held = one ? heldBy(cache, ...chosen[0], statistic) : heldByAll(cache, chosen);
    const explain = (shade) => shade === null ? "held"
      : one ? `held; ${words}: higher than in ${Math.round(100 * shade)} % of the held tokens`
        : `held by ${Math.round(shade * chosen.length)} of ${chosen.length} heads`;
    promptSpans.forEach((span, position) => paint(span, position, held, cache.length, explain));
    const own = makeSpans(part("own"), cache.answer);
    own.forEach((span, place) => paint(span, promptSpans.length + place, held, cache.length, explain));

    const where = one ? `in layer ${choice.layer}, KV head ${choice.head}` : `by at least one of ${number(chosen.length)} heads`;
    const darker = !one ? " The more heads hold a token, the stronger its shade."
      : statistic ? ` The higher the ${words}, the stronger the shade.` : "";
    part("status").textContent = `${cache.name}: ${number(held.size)} of ${number(cache.length)} tokens are held ${where}.${darker}`;
    root.dataset.held = held.size;

    part("own-title").textContent = `${data.answers}: ${cache.name}`;
    part("beside").hidden = full === null || full === cache;
    if (full !== null && full !== cache) {
      const theirs = makeSpans(part("full"), full.answer);
      const differs = cache.answer.findIndex((text, place) => text !== full.answer[place]);
      part("full-title").textContent = `${data.answers}: ${full.name}` + (differs < 0 ? " (the same)" : "");
      for (const span of differs < 0 ? [] : [own[differs], theirs[differs]]) {
        if (span) span.classList.add("differs");
      }
    }
    drawMap(cache, chosen);
  }

  // The choice is a part of the address, where a page has one of its own: #cache=1&layer=2&head=0
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    choice.shade = given.get("shade") ?? "";
    for (const role of ["cache", "layer", "head"]) {
      if ([...part(role).options].some((each) => each.value === given.get(role))) choice[role] = given.get(role);
    }
  }
  function choose(changes) {
    Object.assign(choice, changes);
    if (location.protocol !== "about:") history.replaceState(null, "", `#${new URLSearchParams(choice)}`);
    show();
  }
  for (const role of Object.keys(choice)) {
    part(role).addEventListener("change", (event) => choose({ [role]: event.target.value }));
  }
  part("map").addEventListener("click", (event) => {
    const row = Math.floor((event.offsetY / event.target.clientHeight) * data.layers.length * data.heads);
    choose({ layer: data.layers[Math.floor(row / data.heads)], head: row % data.heads });
  });
  window.addEventListener("hashchange", () => { readAddress(); show(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  readAddress();
  show();
})();
