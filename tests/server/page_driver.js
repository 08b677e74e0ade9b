// Runs the chat page's script under node with just enough of a document, against a real server:
//   node page_driver.js PAGE URL MESSAGE... ; prints what the page shows after the last message, as JSON lines.
"use strict";
const fs = require("node:fs");
const vm = require("node:vm");
const [page, url, ...said] = process.argv.slice(2);

class Element {
  constructor(tag) {
    Object.assign(this, { tag, className: "", children: [], value: "", checked: true, disabled: false, handlers: {} });
    Object.assign(this, { scrollHeight: 0, scrollTop: 0, clientHeight: 0 });
  }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((c) => (typeof c === "string" ? c : c.textContent)).join(""); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  addEventListener(name, handler) { this.handlers[name] = handler; }
  set innerHTML(text) { throw new Error("innerHTML"); }
}

const elements = {};
const document = {
  createElement: (tag) => new Element(tag),
  getElementById: (id) => (elements[id] ??= new Element(id)),
};
const context = vm.createContext({
  document, location: { pathname: "/" }, performance, setTimeout, console, TextDecoderStream, AbortController, Number, JSON,
  fetch: (path, options) => fetch(url + path, options),
});
vm.runInContext(fs.readFileSync(page, "utf8").split("<script>")[1].split("</script>")[0], context);

const idle = async () => {
  do await new Promise((done) => setTimeout(done, 5));
  while (elements.send?.disabled || !elements.status?.textContent);
};

function show(element) {
  if (typeof element === "string") return;
  const own = element.children.filter((c) => typeof c === "string").join("");
  if (own) console.log(JSON.stringify([element.className || element.tag, own]));
  element.children.forEach(show);
}

(async () => {
  elements.tools = Object.assign(new Element("tools"), { value: process.env.TOOLS ?? "" });
  for (const text of said) {
    elements.input = Object.assign(elements.input ?? new Element("input"), { value: text });
    elements.say.handlers.submit({ preventDefault() {} });
    await idle();
  }
  await idle();
  show(elements.chat);
  console.log(JSON.stringify(["status", elements.status.textContent]));
})();
