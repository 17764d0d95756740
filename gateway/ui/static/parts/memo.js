import { Component, html } from "../vendor/preact-htm.js";

function differ(before, after) {
  for (const name in after) if (before[name] !== after[name]) return true;
  for (const name in before) if (!(name in after)) return true;
  return false;
}

/**
 * A component that renders again only when one of its properties is another value or object.
 * @param {function(Object): any} view
 */
export function memo(view) {
  return class extends Component {
    shouldComponentUpdate(props) {
      return differ(this.props, props);
    }

    render(props) {
      return html`<${view} ...${props} />`;
    }
  };
}
