// How messages look, and what can be done with each: copy, edit, regenerate, answer a call.

const number = (value) => value.toLocaleString("en");

// Only the new end is appended, so that what the reader has selected stays selected.
function grow(element, text) {
  const shown = element.textContent.length;
  if (text.length > shown) element.append(text.slice(shown));
}

function button(text, action, label) {
  const element = make("button", "small", text);
  element.type = "button";
  if (label) element.setAttribute("aria-label", label);
  element.addEventListener("click", () => action(element));
  return element;
}

async function copy(text, pressed) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not from this machine and not encrypted have no clipboard of their own.
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    pressed.focus();
  }
  const before = pressed.dataset.text ?? pressed.textContent;
  pressed.dataset.text = before;
  pressed.textContent = done ? "Copied" : "Not copied";
  say(pressed.textContent);
  setTimeout(() => (pressed.textContent = before), 1500);
}

function thoughtLabel(message) {
  return message.thought_s >= 0.05 ? "Thought for " + message.thought_s.toFixed(1) + " s" : "Thought";
}

function thoughtFold(parent) {
  const label = make("summary");
  const text = make("div", "text");
  parent.append(make("details", "thought", label, text));
  return { label, text };
}

function callBox(call) {
  const text = make("div", "text");
  const element = make("div", "call", make("div", "name", "Tool call: " + call.function.name), text);
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", "Tool call " + call.function.name);
  return { element, text };
}

function resultOf(chat, index, id) {
  for (const message of chat.messages.slice(index + 1)) {
    if (message.role !== "tool") return undefined;
    if (message.tool_call_id === id) return message;
  }
  return undefined;
}

// The calls at the end of a conversation that nobody has answered.
function openCalls(chat) {
  const index = chat.messages.findLastIndex((message) => message.role !== "tool");
  const calls = chat.messages[index]?.tool_calls ?? [];
  return calls.filter((call) => !resultOf(chat, index, call.id));
}

// A call's box with its result, or with a place to type one; all results of a reply go out together.
function callTurns(chat, index, parent) {
  const { tool_calls: calls } = chat.messages[index];
  const form = make("form");
  const open = [];
  calls.forEach((call, i) => {
    const box = callBox(call);
    box.text.textContent = call.function.arguments;
    const result = resultOf(chat, index, call.id);
    if (result) box.element.append(make("div", "label", "Result"), make("div", "text", result.content));
    else {
      const many = calls.length > 1 ? " (" + (i + 1) + " of " + calls.length + ")" : "";
      const area = make("textarea", "mono");
      area.rows = 2;
      area.dataset.call = call.id;
      box.element.append(make("label", "", "Result of " + call.function.name + many, area));
      open.push([call, area]);
    }
    form.append(box.element);
  });
  parent.append(form);
  if (!open.length || openCalls(chat).length !== open.length) return;
  const send = make("button", "main", open.length > 1 ? "Send " + open.length + " results" : "Send result");
  form.append(make("div", "row", send, make("span", "note", "Tools are not run here: type what each gave back.")));
  const ready = () => (send.disabled = open.some(([, area]) => !area.value));
  form.addEventListener("input", ready);
  ready();
  form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target.tagName !== "TEXTAREA") return;
    event.preventDefault();
    const empty = open.find(([, area]) => !area.value);
    if (empty) empty[1].focus();
    else form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.reply || send.disabled) return;
    ask(chat, open.map(([call, area]) => ({ role: "tool", tool_call_id: call.id, content: area.value })));
  });
}

function editTurn(chat, index, section, text = chat.messages[index].content) {
  const area = make("textarea");
  area.value = text;
  area.rows = Math.min(12, area.value.split("\n").length + 1);
  area.setAttribute("aria-label", "Edit message");
  const form = make("form", "", area, make("div", "row", make("button", "main", "Send"), button("Cancel", () => show(chat))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) ask(chat, [{ role: "user", content: area.value }], index);
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      show(chat);
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  section.replaceChildren(form);
  area.focus();
}

function userTurn(chat, index) {
  const message = chat.messages[index];
  const section = make("section", "turn user", make("div", "text", message.content));
  section.setAttribute("aria-label", "You");
  section.dataset.index = index;
  const foot = make("div", "foot", button("Copy", (b) => copy(message.content, b), "Copy this message"));
  if (!chat.reply) {
    const edit = button("Edit", () => editTurn(chat, index, section), "Edit this message");
    edit.classList.add("edit");
    foot.append(edit);
  }
  section.append(foot);
  if (message.failed) section.append(...failure(chat, message.failed, () => retry(chat)));
  return section;
}

function failure(chat, problem, again) {
  const text = make("div", "error", problem);
  text.setAttribute("role", "alert");
  return chat.reply ? [text] : [text, make("div", "", button("Try again", again))];
}

function assistantTurn(chat, index) {
  const message = chat.messages[index];
  const section = make("section", "turn assistant");
  section.setAttribute("aria-label", "Reply");
  if (message.reasoning_content) {
    const fold = thoughtFold(section);
    fold.label.textContent = thoughtLabel(message);
    fold.text.textContent = message.reasoning_content;
  }
  if (message.content) {
    const text = new Markdown();
    text.show(message.content);
    section.append(text.element);
  }
  if (!message.content && !message.tool_calls && !message.lost) section.append(make("div", "note", "(no answer)"));
  if (message.tool_calls) callTurns(chat, index, section);
  if (message.lost) section.append(make("div", "note", "A call of " + message.lost + " was not finished, and is left out."));
  const again = () => ask(chat, [], index);
  if (message.problem) section.append(...failure(chat, message.problem, again));
  const foot = make("div", "foot");
  if (message.content) foot.append(button("Copy", (b) => copy(message.content, b), "Copy this reply"));
  if (!chat.reply && !message.problem) foot.append(button("Regenerate", again, "Regenerate this reply"));
  if (message.note) foot.append(make("span", "note", message.note));
  section.append(foot);
  return section;
}

function turns(chat) {
  const shown = chat.messages.flatMap((message, i) => {
    if (message.role === "user") return [userTurn(chat, i)];
    if (message.role === "assistant") return [assistantTurn(chat, i)];
    return message.failed ? failure(chat, message.failed, () => retry(chat)) : []; // a result is shown with its call
  });
  if (chat.reply) shown.push(chat.reply.element);
  return shown;
}
