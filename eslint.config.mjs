import js from "@eslint/js";

// Types name what the page has; tsc finds names that do not exist.
const rules = { ...js.configs.recommended.rules, "no-undef": "off", "no-control-regex": "off", eqeqeq: ["error", "always", { null: "ignore" }],
  "no-var": "error", "prefer-const": "error", "no-unused-vars": ["error", { argsIgnorePattern: "^_" }] };

export default [{ files: ["allranks/**/*.js", "tests/front/*.js", "eslint.config.mjs"], rules }, { ignores: [".*/", "build/"] }];
