// Pictures have a light and a dark form, of which browsers take the system's. Here they follow the page's switch.
const DARK = "(prefers-color-scheme: dark)";
const sources = [...document.querySelectorAll("picture source")].map((one) => [one, one.media]);

function follow() {
  const always = document.body.dataset.mdColorScheme === "slate" ? "(min-width: 0)" : "(max-width: 0)";
  for (const [source, media] of sources) source.media = media.replace(DARK, always);
}

new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
follow();
