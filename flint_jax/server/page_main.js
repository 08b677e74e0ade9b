// The page as a whole: which conversation is on view, sending, following, the list, the server's state.

const base = location.pathname.replace(/\/$/, "");
const IDEAS = [
  "Explain how a hash table works, with a small example in Python.",
  "Write a shell script that finds the ten largest files below a folder.",
  "Rewrite this so that it is clear and friendly: ",
];
let current = newChat();
const loaded = new Map(); // conversations with a reply on its way, by id: they must not be read anew from the store
const touch = matchMedia("(pointer: coarse)"); // there Enter breaks the line, and the button sends
let following = true;
let lastTop = 0;

function say(text) {
  get("announce").textContent = text;
}

// -- following --------------------------------------------------------------------------------------------------------

function follow() {
  const chat = get("chat");
  if (following) chat.scrollTop = chat.scrollHeight;
  get("down").hidden = following;
}

get("chat").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = get("chat");
  const low = scrollHeight - scrollTop - clientHeight < 40;
  if (low) following = true;
  else if (scrollTop < lastTop) following = false;
  lastTop = scrollTop;
  get("down").hidden = following || low;
});
get("down").addEventListener("click", () => {
  following = true;
  follow();
  get("input").focus();
});
new ResizeObserver(follow).observe(get("chat"));

// -- a conversation ----------------------------------------------------------------------------------------------------

const folds = () => [...get("turns").querySelectorAll("details")];

function show(chat, fresh = false) {
  if (fresh) following = true;
  const unfolded = chat === current ? folds().map((fold) => fold.open) : [];
  current = chat;
  get("turns").replaceChildren(...turns(chat));
  folds().forEach((fold, i) => (fold.open = unfolded[i] ?? false));
  get("empty").hidden = Boolean(chat.messages.length || chat.reply);
  get("send").hidden = Boolean(chat.reply);
  get("stop").hidden = !chat.reply;
  const open = !chat.reply && openCalls(chat).length;
  get("input").placeholder = open ? "Or go on without the results" : "Message";
  document.title = (chat.title ? chat.title + " – " : "") + "Flint";
  showList();
  follow();
}

function save(chat) {
  if (!chat.messages.length) return;
  chat.changed = Date.now();
  const first = chat.messages.find((message) => message.role === "user");
  chat.title = (first?.content ?? "").trim().slice(0, 80).replace(/\s+/g, " ") || "Conversation";
  get("notice").textContent = storeChat(chat) ? "" : "This browser has no room for this conversation: it is lost when " +
    "the page is closed. Delete others to make room.";
}

// Sends a conversation on with more messages, from `index` on anew if given.
async function ask(chat, more, index = chat.messages.length) {
  if (chat.reply) return;
  const before = chat.messages;
  const messages = [...before.slice(0, index), ...more];
  if (!more.length) for (const message of messages) delete message.failed;
  let body;
  try {
    body = requestBody(messages);
  } catch (error) {
    get("settings").showModal();
    checkTools();
    get("tools").focus();
    return;
  }
  chat.messages = messages;
  chat.reply = new Reply(chat);
  loaded.set(chat.id, chat);
  following = true;
  save(chat);
  show(chat);
  say("Reply begins");
  const reason = await chat.reply.run(body);
  loaded.delete(chat.id);
  if (chat.dropped) return;
  // What was to be replaced stays when there is nothing in its place.
  const back = reason === "failed" && index < before.length && chat.messages.at(-1).failed;
  if (back) {
    delete chat.messages.at(-1).failed;
    chat.messages = before;
  }
  save(chat);
  if (current.id === chat.id) {
    const here = document.activeElement;
    const free = [document.body, get("stop"), get("send")].includes(here) || (here === get("input") && !here.value);
    show(chat);
    const area = get("turns").querySelector("textarea[data-call]");
    if (free && !touch.matches) (area ?? get("input")).focus({ preventScroll: true }); // a phone would raise its keys
    if (back) restored(chat, more, index, back);
  } else showList();
  say(reason ? "Reply " + reason : openCalls(chat).length ? "The model calls a tool" : "Reply: " + chat.messages.at(-1).content);
  if (reason === "failed") status();
}

function restored(chat, more, index, problem) {
  get("notice").textContent = problem + " The conversation is as it was.";
  const section = get("turns").querySelector('[data-index="' + index + '"]');
  if (more.length && section) editTurn(chat, index, section, more[0].content);
}

const retry = (chat) => ask(chat, []);

// A new message. One that failed before it was answered goes, and calls that nobody answered are told so.
function sendText(text) {
  const kept = current.messages.filter((message) => !(message.failed && message.role === "user"));
  for (const message of kept) {
    delete message.failed;
    delete message.problem; // its note still says so
  }
  const skipped = openCalls(current).map((call) => (
    { role: "tool", tool_call_id: call.id, content: "(no result: the user went on without it)" }
  ));
  const before = current.messages;
  current.messages = kept;
  ask(current, [...skipped, { role: "user", content: text }]);
  if (!current.reply) {
    current.messages = before;
    return false;
  }
  return true;
}

get("say").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = get("input").value;
  if (current.reply || !text.trim()) return;
  if (!sendText(text)) return;
  get("input").value = "";
  fit();
});

function fit() {
  const input = get("input");
  input.style.height = "auto";
  input.style.height = input.scrollHeight + 2 + "px";
}
get("input").addEventListener("input", fit);
get("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
    event.preventDefault();
    get("say").requestSubmit();
  } else if (event.key === "ArrowUp" && !get("input").value && !current.reply) {
    const edit = [...get("turns").querySelectorAll(".user .edit")].at(-1);
    if (edit) event.preventDefault();
    edit?.click();
  }
});
get("stop").addEventListener("click", () => current.reply?.abort.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || get("settings").open) return;
  if (get("chats").classList.contains("open")) closeDrawer();
  else current.reply?.abort.abort();
});
// A reply that the page does not live to see: what came is kept.
addEventListener("pagehide", () => {
  for (const chat of loaded.values()) {
    chat.reply.end("stopped");
    save(chat);
  }
});

// -- the list ----------------------------------------------------------------------------------------------------------

function showList() {
  const chats = storedChats();
  get("list").replaceChildren(...chats.map((stored) => {
    const chat = loaded.get(stored.id) ?? stored;
    const open = make("button", "chat", (chat.reply ? "… " : "") + chat.title);
    open.type = "button";
    open.title = chat.title;
    if (chat.id === current.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => {
      if (chat.id !== current.id) show(chat, true);
      drawer(false);
    });
    const drop = make("button", "drop", "✕");
    drop.type = "button";
    drop.setAttribute("aria-label", "Delete " + chat.title);
    drop.addEventListener("click", () => {
      if (!confirm("Delete “" + chat.title + "”?")) return;
      chat.dropped = true;
      chat.reply?.abort.abort();
      dropChat(chat.id);
      if (chat.id === current.id) show(newChat(), true);
      else showList();
    });
    return make("li", chat.id === current.id ? "here" : "", open, drop);
  }));
}

function drawer(open) {
  get("chats").classList.toggle("open", open);
  get("shade").hidden = !open;
  get("page").inert = open;
  get("menu").setAttribute("aria-expanded", String(open));
  if (open) get("clear").focus();
}
const closeDrawer = () => {
  drawer(false);
  get("menu").focus();
};
get("menu").addEventListener("click", () => drawer(true));
get("shade").addEventListener("click", closeDrawer);
get("clear").addEventListener("click", () => {
  show(newChat(), true);
  drawer(false);
  if (!touch.matches) get("input").focus();
});
// Another tab wrote. What is on view here follows, unless it is being worked on.
addEventListener("storage", (event) => {
  const chat = event.key === CHAT + current.id && storedChats().find((stored) => stored.id === current.id);
  if (chat && !current.reply && !get("turns").contains(document.activeElement)) show(chat);
  else showList();
});

// -- settings ----------------------------------------------------------------------------------------------------------

function checkTools() {
  let problem = "";
  try {
    tools();
  } catch (error) {
    problem = error.message;
  }
  get("tools-error").textContent = problem;
  get("tools").setAttribute("aria-invalid", String(Boolean(problem)));
}
get("open").addEventListener("click", () => get("settings").showModal());
get("settings").addEventListener("click", (event) => {
  if (event.target === get("settings")) get("settings").close(); // beside the drawer
});
get("settings").addEventListener("input", storeSettings);
get("settings").addEventListener("close", () => touch.matches || get("input").focus());
get("tools").addEventListener("change", checkTools);
get("key").addEventListener("change", () => {
  greeted = false;
  status();
});

// -- the server --------------------------------------------------------------------------------------------------------

let timer = 0;
let round = 0;
let greeted = false;

// Asks again for as long as the page is open: soon while the server is away, now and then while it is there.
async function status() {
  clearTimeout(timer);
  round += 1;
  const mine = round;
  const tell = (text, bad = false) => {
    if (mine !== round) return; // asked again meanwhile
    greeted = !bad;
    if (get("status").textContent !== text) get("status").textContent = text;
    get("status").classList.toggle("bad", bad);
  };
  let again = 2000;
  try {
    const health = await (await fetch(base + "/health", { signal: AbortSignal.timeout(10000) })).json();
    if (health.status !== "ready") tell([health.status, health.detail].filter(Boolean).join(": "), true);
    else {
      again = 15000;
      if (greeted) return;
      const response = await fetch(base + "/v1/models", { headers: headers(), signal: AbortSignal.timeout(10000) });
      if (response.status === 401) tell("this server asks for an API key: see Settings", true);
      else {
        const model = (await response.json()).data[0];
        tell(model.id + ", context " + number(model.max_model_len));
        get("what").textContent = model.id;
        get("about").textContent = "A language model on this server. It takes up to " + number(model.max_model_len) +
          " tokens of conversation at once. What you write goes to this server only.";
      }
    }
  } catch {
    tell("no answer from the server, trying again", true);
  } finally {
    if (mine === round) timer = setTimeout(status, document.hidden ? 60000 : again);
  }
}
addEventListener("online", status);
document.addEventListener("visibilitychange", () => document.hidden || status());

get("ideas").append(...IDEAS.map((idea) => button(idea.trim(), () => {
  get("input").value = idea;
  fit();
  get("input").focus();
})));
restoreSettings();
checkTools();
show(current);
status();
