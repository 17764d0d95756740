/** The page: session, event stream, views. */

import * as api from "./core/api.js";
import { setOffset } from "./core/clock.js";
import { openFeed } from "./core/feed.js";
import { createPlayground } from "./core/playground.js";
import { initial, reduce } from "./core/reducer.js";
import { route } from "./core/router.js";
import { createStore } from "./core/store.js";
import { Connectivity, Header, Navigation, ThemeSwitch } from "./parts/frame.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";
import { BreakersView } from "./views/breakers.js";
import { KeysView } from "./views/keys.js";
import { MemoryView } from "./views/memory.js";
import { ModelsView } from "./views/models.js";
import { OverviewView } from "./views/overview.js";
import { PlaygroundView } from "./views/playground.js";
import { RequestsView } from "./views/requests.js";
import { SignIn } from "./views/sign_in.js";
import { TimelineView } from "./views/timeline.js";

const VIEWS = {
  overview: { title: "Overview", View: OverviewView },
  memory: { title: "Memory", View: MemoryView },
  models: { title: "Models", View: ModelsView },
  breakers: { title: "Breakers", View: BreakersView },
  requests: { title: "Requests", View: RequestsView },
  timeline: { title: "Timeline", View: TimelineView },
  playground: { title: "Playground", View: PlaygroundView },
  keys: { title: "Keys and usage", short: "Keys", View: KeysView },
};

const store = createStore(reduce, initial());
const playground = createPlayground();

/** @returns {["auto"|"light"|"dark", function(string): void, string]} choice, its setter, and a text that changes with the colors */
function useTheme() {
  const root = document.documentElement;
  const [theme, setTheme] = useState(root.dataset.theme || "auto");
  const [dark, setDark] = useState(false);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setDark(query.matches);
    changed();
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  function choose(next) {
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    localStorage.setItem("headgate-theme", next);
    setTheme(next);
  }
  return [theme, choose, `${theme} ${dark}`];
}

function useRoute() {
  const [parts, setParts] = useState(route);
  useEffect(() => {
    const changed = () => setParts(route());
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return VIEWS[parts[0]] ? parts : ["overview"];
}

async function isSignedIn() {
  try {
    api.useToken((await api.session.read()).csrf);
    return true;
  } catch (error) {
    return error.status !== 401;
  }
}

function useFeed(onSignedOut) {
  const [state, setState] = useState(store.state);
  useEffect(() => {
    const end = store.subscribe((next) => {
      setOffset(next.offset);
      setState(next);
    });
    const feed = openFeed({ url: "api/events", onEvent: store.dispatch, isSignedIn, onSignedOut });
    return () => {
      end();
      feed.close();
    };
  }, []);
  return state;
}

/** The heading of a view that was chosen gets the focus, so that keyboard and screen reader continue there. */
function Title({ name, title }) {
  const heading = useRef(null);
  const first = useRef(true);
  useLayoutEffect(() => {
    document.title = `${title} · Headgate`;
    if (!first.current) heading.current.focus();
    first.current = false;
  }, [name]);
  return html`<h1 ref=${heading} tabindex="-1">${title}</h1>`;
}

function Dashboard({ session, theme, drawn, onTheme, onSignedOut }) {
  const state = useFeed(() => onSignedOut("The session has ended. Sign in again."));
  const parts = useRoute();
  const { title, View } = VIEWS[parts[0]];
  async function signOut() {
    await api.session.close().catch(() => undefined);
    onSignedOut(null);
  }
  return html`
    <${Header} state=${state} session=${session} theme=${theme} onTheme=${onTheme} onSignOut=${signOut} />
    <${Navigation} views=${VIEWS} current=${parts[0]} state=${state} />
    <${Connectivity} state=${state} />
    <main id="main" class=${state.connected ? undefined : "stale"} tabindex="-1">
      <${Title} name=${parts[0]} title=${title} />
      ${state.loaded
        ? html`<${View} key=${parts[0]} state=${state} admin=${session.admin} parts=${parts} theme=${drawn} playground=${playground} />`
        : html`<p class="dim">Waiting for the first snapshot of the gateway …</p>`}
    </main>`;
}

function App({ first, problem }) {
  const [session, setSession] = useState(first);
  const [notice, setNotice] = useState(problem);
  const [theme, onTheme, drawn] = useTheme();
  function signIn(answer) {
    api.useToken(answer.csrf);
    setNotice(null);
    setSession(answer);
  }
  function onSignedOut(reason) {
    playground.clear();
    store.dispatch({ kind: "reset", data: null, at: 0 });
    setNotice(reason);
    setSession(null);
  }
  if (!session) {
    return html`<header class="top"><span class="grow"></span><${ThemeSwitch} theme=${theme} onTheme=${onTheme} /></header>
      <${SignIn} onSignIn=${signIn} notice=${notice} />`;
  }
  const known = { ...session, admin: session.scopes.includes("admin") };
  return html`<${Dashboard} session=${known} theme=${theme} drawn=${drawn} onTheme=${onTheme} onSignedOut=${onSignedOut} />`;
}

/** The skip link must not become a view. */
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});

async function start() {
  let first = null;
  let problem = null;
  try {
    first = await api.session.read();
    api.useToken(first.csrf);
  } catch (error) {
    if (error.status !== 401) problem = error.message;
  }
  render(html`<${App} first=${first} problem=${problem} />`, document.getElementById("app"));
}

start();
