// Markdown as nodes of the document. What the model says becomes text nodes and elements of a fixed set; nothing is
// parsed as HTML, links lead only to the web and to mail, and pictures are not loaded.

const DEEPEST = 12; // lists in quotes in lists ...: beyond it, text is text

function make(tag, kind, ...children) {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.append(...children);
  return element;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+(?=\S)|[ \t]*$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const blank = (line) => !line.trim();
const indent = (line) => line.length - line.trimStart().length;

function begins(lines, i) {
  const line = lines[i];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, i);
}

function isTable(lines, i) {
  return lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE_RULE.test(lines[i + 1]) &&
    cells(lines[i]).length === cells(lines[i + 1]).length;
}

// Lines -> [{source, build}], one for each block of the outermost level.
function blocks(lines, depth) {
  const found = [];
  let i = 0;
  const take = (end, build) => {
    found.push({ source: lines.slice(i, end).join("\n"), build });
    i = end;
  };
  while (i < lines.length) {
    const line = lines[i];
    let match;
    let end = i + 1;
    if (blank(line)) {
      i += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, language] = match;
      const margin = indent(line);
      const closes = (l) => l.trim().length >= fence.length && indent(l) < 4 && !l.trim().replaceAll(fence[0], "");
      while (end < lines.length && !closes(lines[end])) end += 1;
      const code = lines.slice(i + 1, end).map((l) => l.slice(Math.min(margin, indent(l))));
      take(Math.min(end + 1, lines.length), () => codeBlock(code.join("\n"), language.trim().split(/\s/)[0]));
    } else if ((match = HEADING.exec(line))) {
      const [, marks, text] = match;
      take(end, () => make("h" + Math.min(6, marks.length + 2), "", ...inline(text.replace(/[ \t]+#+[ \t]*$/, ""))));
    } else if (RULE.test(line)) {
      take(end, () => make("hr"));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
      const inner = lines.slice(i, end).map((l) => l.replace(QUOTE, ""));
      take(end, () => make("blockquote", "", ...build(inner, depth + 1)));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      end = listEnd(lines, i);
      const inner = lines.slice(i, end);
      take(end, () => list(inner, depth));
    } else if (isTable(lines, i)) {
      end = i + 2;
      while (end < lines.length && lines[end].includes("|") && !blank(lines[end])) end += 1;
      const rows = lines.slice(i, end);
      take(end, () => table(rows));
    } else {
      while (end < lines.length && !blank(lines[end]) && !begins(lines, end) && !ITEM.test(lines[end])) end += 1;
      const text = lines.slice(i, end).map((l) => l.trimStart()).join("\n");
      take(end, () => make("p", "", ...inline(text.trimEnd())));
    }
  }
  return found;
}

const build = (lines, depth) => blocks(lines, depth).map((block) => block.build());
const ordered = (marker) => /\d/.test(marker);

// A list goes on with items of its own kind, and with lines that belong to the item before.
function listEnd(lines, start) {
  const [, margin, marker, space] = ITEM.exec(lines[start]);
  let inside = margin.length + marker.length + Math.min(space.length || 1, 4);
  let end = start + 1;
  for (let i = end; i < lines.length; i += 1) {
    const line = lines[i];
    if (blank(line)) continue;
    const item = ITEM.exec(line);
    const more = item && item[1].length <= margin.length + 1 && ordered(item[2]) === ordered(marker) && !RULE.test(line);
    const lazy = !blank(lines[i - 1]) && !item && !begins(lines, i);
    if (more) inside = item[1].length + item[2].length + Math.min(item[3].length || 1, 4);
    else if (!(lazy || indent(line) >= Math.min(inside, margin.length + 2))) break;
    end = i + 1;
  }
  return end;
}

function list(lines, depth) {
  const [, margin, first] = ITEM.exec(lines[0]);
  const items = [];
  let strip = 0;
  let fence = "";
  for (const line of lines) {
    const item = fence ? null : ITEM.exec(line);
    if (item && item[1].length <= margin.length + 1) {
      strip = item[0].length - Math.max(0, item[3].length - 4);
      items.push([line.slice(strip)]);
      continue;
    }
    const text = line.slice(Math.min(strip, indent(line)));
    const mark = FENCE.exec(text)?.[1] ?? "";
    if (mark && (!fence || mark.startsWith(fence))) fence = fence ? "" : mark;
    items.at(-1).push(text);
  }
  const loose = items.some((item) => item.slice(0, -1).some((l, i) => blank(l) && !blank(item[i + 1])));
  const element = make(ordered(first) ? "ol" : "ul");
  const number = parseInt(first, 10);
  if (ordered(first) && number !== 1) element.start = number;
  for (const item of items) {
    const nodes = build(item, depth + 1);
    const tight = nodes[0]?.tagName === "P" && !loose;
    element.append(make("li", "", ...(tight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes)));
  }
  return element;
}

function cells(row) {
  const found = [""];
  let code = false;
  const text = row.trim().replace(/^\|/, "").replace(/\|$/, "");
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\" && text[i + 1] === "|") found[found.length - 1] += text[(i += 1)];
    else if (text[i] === "|" && !code) found.push("");
    else {
      if (text[i] === "`") code = !code;
      found[found.length - 1] += text[i];
    }
  }
  return found.map((cell) => cell.trim());
}

function table(rows) {
  const head = cells(rows[0]);
  const row = (kind, values) => make("tr", "", ...head.map((_, i) => make(kind, "", ...inline(values[i] ?? ""))));
  const body = rows.slice(2).map((r) => row("td", cells(r)));
  return make("div", "wide", make("table", "", make("thead", "", row("th", head)), make("tbody", "", ...body)));
}

function codeBlock(code, language) {
  const button = make("button", "small", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", "Copy this code");
  button.addEventListener("click", () => copy(code, button));
  const pre = make("pre", "", make("code", "", code));
  pre.tabIndex = 0;
  return make("div", "code", make("div", "bar", make("span", "", language || "code"), button), pre);
}

const SAFE_LINK = /^(?:https?:\/\/|mailto:)[^\s]+$/i;
const WEB = /https?:\/\/[^\s<>"'`]+/iy;
const WORD = /[\p{L}\p{N}]/u;

function link(address, ...children) {
  const element = make("a", "", ...children);
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer";
  return element;
}

// One paragraph's text -> nodes. Closing marks are looked for sparingly: no text may hang the page.
function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  const put = (node) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
  };
  const seen = new Map(); // mark -> where a look began and what it found: no stretch is searched twice for nothing
  const find = (mark, from) => {
    const known = seen.get(mark);
    if (known && known.from <= from && (known.at < 0 || from <= known.at)) return known.at;
    const at = text.indexOf(mark, from);
    seen.set(mark, { from, at });
    return at;
  };
  let i = 0;
  while (i < text.length) {
    const c = text[i];
    if (c === "\\" && i + 1 < text.length && /[!-/:-@[-`{-~]/.test(text[i + 1])) {
      plain += text[i + 1];
      i += 2;
      continue;
    }
    if (c === "\n") {
      plain = plain.trimEnd();
      put(make("br"));
      i += 1;
      continue;
    }
    if (c === "`") {
      let run = 1;
      while (text[i + run] === "`") run += 1;
      const mark = "`".repeat(run);
      let at = find(mark, i + run);
      while (at >= 0 && text[at + run] === "`") {
        let past = at + run;
        while (text[past] === "`") past += 1;
        at = find(mark, past);
      }
      if (at >= 0) {
        const code = text.slice(i + run, at).replaceAll("\n", " ");
        put(make("code", "", /^ .*[^ ].* $/.test(code) ? code.slice(1, -1) : code));
        i = at + run;
      } else {
        plain += mark;
        i += run;
      }
      continue;
    }
    if (depth < DEEPEST && (c === "*" || c === "_" || c === "~")) {
      const span = emphasis(text, i, find);
      if (span) {
        const inner = inline(text.slice(i + span.mark.length, span.end), depth + 1);
        put(make(span.tag, "", ...inner));
        i = span.end + span.mark.length;
        continue;
      }
      let run = 1;
      while (text[i + run] === c) run += 1;
      plain += text.slice(i, i + run);
      i += run;
      continue;
    }
    if (depth < DEEPEST && (c === "[" || (c === "!" && text[i + 1] === "["))) {
      const open = c === "!" ? i + 2 : i + 1;
      const middle = find("](", open);
      const close = middle < 0 || middle - open > 2000 ? -1 : closing(text, middle + 2);
      if (close > 0 && !text.slice(open, middle).includes("\n\n")) {
        const label = text.slice(open, middle);
        const address = text.slice(middle + 2, close).trim().replace(/\s+"[^"]*"$/, "").replace(/^<(.*)>$/, "$1");
        if (!label.includes("[") && SAFE_LINK.test(address)) {
          put(link(address, ...(label ? inline(label, DEEPEST) : [address])));
          i = close + 1;
          continue;
        }
      }
    }
    if ((c === "h" || c === "H") && !WORD.test(text[i - 1] ?? " ")) {
      WEB.lastIndex = i;
      const address = WEB.exec(text)?.[0].replace(/[.,;:!?*_~\]]+$/, "");
      const whole = address && address.endsWith(")") && !address.includes("(") ? address.replace(/\)+$/, "") : address;
      if (whole) {
        put(link(whole, whole));
        i += whole.length;
        continue;
      }
    }
    plain += c;
    i += 1;
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

function emphasis(text, i, find) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i)) continue;
    const word = mark[0] === "_";
    const before = text[i - 1] ?? " ";
    const after = text[i + mark.length] ?? " ";
    if (/\s/.test(after) || (word && WORD.test(before))) continue;
    // A few closers are tried: one within a word, after a space or of another length does not close.
    let at = i + mark.length;
    for (let tries = 0; tries < 16; tries += 1) {
      at = find(mark, at + (tries ? 1 : 0));
      if (at < 0) break;
      const next = text[at + mark.length] ?? " ";
      const longer = mark.length === 1 && (next === mark || text[at - 1] === mark);
      if (longer) {
        while (text[at + 1] === mark) at += 1;
        continue;
      }
      if (mark.length === 2 && next === mark[0]) at += 1; // ***both***: the inner one closes first
      if (at > i + mark.length && !/\s/.test(text[at - 1]) && text[at - 1] !== "\\" &&
          !(word && WORD.test(text[at + mark.length] ?? " "))) {
        return { mark, tag, end: at };
      }
    }
  }
  return null;
}

// Where the bracket of a link's address closes, brackets within it counted; -1 without one.
function closing(text, from) {
  let depth = 1;
  for (let i = from; i < text.length && i < from + 4000 && text[i] !== "\n"; i += 1) {
    if (text[i] === "(") depth += 1;
    if (text[i] === ")" && (depth -= 1) === 0) return i;
  }
  return -1;
}

// An element that shows a text as it grows: blocks that did not change stay as they are.
class Markdown {
  constructor() {
    this.element = make("div", "md");
    this.sources = [];
  }
  show(text) {
    const now = blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
    let same = 0;
    while (same < now.length && same < this.sources.length && now[same].source === this.sources[same]) same += 1;
    while (this.element.children.length > same) this.element.lastElementChild.remove();
    this.element.append(...now.slice(same).map((block) => block.build()));
    this.sources = now.map((block) => block.source);
  }
}
