// The widget. What the notebook keeps is the still picture alone, so that it is there without a
// kernel; a player takes its place on every page that listens to the kernel.

class Places {
  constructor(model) {
    this.model = model;
    this.players = [];
    this.look = () => {
      cancelAnimationFrame(this.waiting);
      this.waiting = requestAnimationFrame(() => this.fill());
    };
    this.observer = new MutationObserver(this.look);
    this.observer.observe(document.body, { childList: true, subtree: true });
    model.on("change:state", this.look);
    this.fill();
  }

  fill() {
    for (const place of document.getElementsByClassName(this.model.get("state").place)) {
      if (place.querySelector(".ar-explainer")) continue;
      // A picture that has been replaced by a newer one leaves its player to it.
      let player = this.players.find(({ root }) => !root.isConnected);
      if (!player) this.players.push(player = new Player(this.model));
      place.replaceChildren(player.root);
      if (player.focused && document.activeElement === document.body) player.focused.focus();
    }
  }

  close() { this.observer.disconnect(); }
}

export default () => ({
  initialize({ model }) {
    const places = new Places(model);
    return () => places.close();
  },
});
