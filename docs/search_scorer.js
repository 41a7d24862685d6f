// The order of search results: guides before the reference and logbooks, which mention everything.
const WEIGHTS = [
  [/^(why|support|guide|migrating)(\/|$)/, 10],
  [/^(clients|deployment|distributed)\//, 8],
  [/^(benchmarks|architecture|glossary|project)(\/|$)/, -10],
];

var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    score + (WEIGHTS.find(([pages]) => pages.test(page))?.[1] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
