const NARROW_PX = 560, LABEL_CHARACTERS = 28;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const broken = (text) => text.replace(" (", "<br>(").replace(": ", ":<br>");

/* Colours of the page's theme, whatever the drawing was made with. */
function themed(layout) {
  const ink = css("--ink"), grid = css("--grid"), clear = "rgba(0,0,0,0)";
  Object.assign(layout, {paper_bgcolor: clear, plot_bgcolor: clear});
  layout.font = {...layout.font, color: ink};
  layout.hoverlabel = {...layout.hoverlabel, bgcolor: css("--paper")};
  for (const axis of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
    Object.assign(layout[axis], {gridcolor: grid, zerolinecolor: grid, linecolor: grid});
  }
  for (const note of layout.annotations || []) {
    note.font = {...note.font, color: css("--soft")};
    if (note.bgcolor) note.bgcolor = css("--paper");
  }
}

/* A label in short lines. */
function wrapped(label) {
  const lines = [""];
  for (const word of label.replaceAll("<br>", " ").split(" ")) {
    const line = lines[lines.length - 1];
    if (line && line.length + word.length >= LABEL_CHARACTERS) lines.push(word);
    else lines[lines.length - 1] = line ? `${line} ${word}` : word;
  }
  return lines.join("<br>");
}
const relabelled = (values) => values.map((each) => (typeof each === "string" ? wrapped(each) : each));

/* A narrow screen: labels, titles and notes in short lines, room for what stands right of a bar. */
function narrowed({data, layout}) {
  for (const trace of data) {
    if (Array.isArray(trace.y)) trace.y = relabelled(trace.y);
  }
  if (layout.yaxis.categoryarray) layout.yaxis.categoryarray = relabelled(layout.yaxis.categoryarray);
  layout.yaxis.tickfont = {size: 8};
  layout.xaxis.nticks = 4;
  layout.font = {...layout.font, size: 11};
  layout.margin = {...layout.margin, l: 4, r: 8};
  for (const axis of Object.keys(layout).filter((name) => /^[xy]axis/.test(name))) {
    if (layout[axis].title) layout[axis].title.text = broken(layout[axis].title.text || "");
  }
  for (const note of layout.annotations || []) {
    const points = note.showarrow !== false;
    note.text = points ? broken(note.text) : note.text.split(" · ")[0];
    if (typeof note.y === "string") note.y = wrapped(note.y);
    const [low, high] = layout.xaxis.range || [0, 1], isRight = note.x > (low + high) / 2;
    if (points) Object.assign(note, {xanchor: isRight ? "right" : "left", ax: isRight ? -8 : 8, ay: -40});
    else if (layout.xaxis.range) layout.xaxis.range[1] = Math.max(layout.xaxis.range[1], 1.45 * note.x);
  }
}

function draw() {
  for (const place of document.querySelectorAll("div.figure")) {
    const figure = JSON.parse(place.dataset.figure);
    themed(figure.layout);
    if (place.clientWidth < NARROW_PX) narrowed(figure);
    Plotly.react(place, figure.data, figure.layout, {displayModeBar: false, responsive: true});
  }
}
draw();
dark.addEventListener("change", draw);

/* The table of configurations: sort by a heading, filter by text, copy a command. */
function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.value);
}
for (const heading of document.querySelectorAll("th[data-sort]")) {
  const sort = () => {
    const body = heading.closest("table").tBodies[0], column = heading.cellIndex;
    const down = heading.getAttribute("aria-sort") !== "descending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = (row) => row.cells[column].dataset.value !== "";
    const rows = [...body.rows].sort((one, two) => {
      if (known(one) !== known(two)) return known(one) ? -1 : 1;
      const a = value(one, column), b = value(two, column);
      return (a < b ? 1 : a > b ? -1 : 0) * (down ? 1 : -1);
    });
    body.append(...rows);
  };
  heading.tabIndex = 0;
  heading.addEventListener("click", sort);
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}
for (const field of document.querySelectorAll("input[data-filters]")) {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.getElementById(field.dataset.filters).tBodies[0].rows) {
      const text = row.cells[0].textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.copies);
    button.textContent = "copied";
  });
}
