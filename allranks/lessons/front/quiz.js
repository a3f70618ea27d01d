// The quiz: what will the next round do? Each question says after the answer why it is so.

import { make, put } from "../../widgets/front/elements.js";

export class Quiz {
  /** @param {import("./player.js").Player} player */
  constructor(player) {
    this.player = player;
    this.on = false;
    this.right = this.asked = this.index = 0;
    this.answered = false;
    /** @type {HTMLElement[]} */
    this.buttons = [];
    this.title = make("legend", {});
    this.question = make("p", { className: "ar-question" });
    this.answers = make("div", { className: "ar-answers" });
    this.verdict = make("p", { className: "ar-verdict", role: "status" });
    this.next = player.button("", "", () => this.proceed());
    this.element = make("fieldset", { className: "ar-quiz", hidden: true }, this.title, this.question, this.answers,
      this.verdict, this.next);
    this.toggle = player.button("predict the next round", "predict the next round: a question before each", () => this.set(!this.on));
    this.toggle.setAttribute("aria-pressed", "false");
  }

  /** @param {boolean} on */
  set(on) {
    if (on === this.on) return;
    this.on = on;
    this.element.hidden = !on;
    this.toggle.setAttribute("aria-pressed", String(on));
    this.right = this.asked = 0;
    if (on && this.player.at >= this.player.last) this.player.go(0);
    else this.player.show(this.player.at);
    this.begin();
  }

  // Another round stands there: its first question.
  begin() {
    this.index = 0;
    this.pose();
  }

  get questions() { return this.player.state.questions[this.player.at + 1] ?? []; }

  pose() {
    if (!this.on) return;
    const { player } = this, found = this.questions[this.index];
    this.answered = false;
    put(this.verdict, "");
    put(this.title, player.at < player.last ? `Predict round ${player.at + 1} of ${player.last}` : "The end");
    put(this.question, found ? found.asked : player.at < player.last ? "No question about this round."
      : `Every rank has the sum. ${this.score()}`);
    this.buttons = (found?.answers ?? []).map((answer) => player.button(answer.said, answer.said, () => this.answer(answer)));
    this.answers.replaceChildren(...this.buttons);
    this.next.hidden = Boolean(found);
    this.label();
    if (found) player.circle.ask(found.rank, (chunk) => {
      const meant = found.answers.find((answer) => answer.chunk === chunk);
      if (meant) this.answer(meant);
    });
  }

  /** @param {import("./types").Answer} chosen */
  answer(chosen) {
    if (this.answered) return;
    this.answered = true;
    this.asked += 1;
    this.right += Number(chosen.right);
    const { answers } = this.questions[this.index];
    answers.forEach((answer, i) => {
      const button = this.buttons[i];
      button.setAttribute("aria-disabled", "true");
      if (answer.right) button.textContent = `✓ ${answer.said}`;
      else if (answer === chosen) button.textContent = `✗ ${answer.said}`;
      button.classList.toggle("ar-right", answer.right);
      button.classList.toggle("ar-wrong", answer === chosen && !answer.right);
    });
    put(this.verdict, `${chosen.right ? "Right." : "No."} ${chosen.why} ${this.score()}`);
    this.next.hidden = false;
    this.label();
    this.next.focus();
  }

  score() { return this.asked ? `${this.right} of ${this.asked} right so far.` : ""; }

  label() {
    const { player } = this;
    const said = this.index + 1 < this.questions.length ? "next question" : player.at < player.last ? "play the round" : "from the start";
    put(this.next, said);
    this.next.title = said;
    this.next.setAttribute("aria-label", said);
  }

  async proceed() {
    const { player } = this;
    if (this.index + 1 < this.questions.length) {
      this.index += 1;
      this.pose();
    } else if (player.at < player.last) {
      if (await player.fly()) this.begin();
    } else player.go(0);
    (this.buttons[0] ?? this.next).focus();
  }
}
