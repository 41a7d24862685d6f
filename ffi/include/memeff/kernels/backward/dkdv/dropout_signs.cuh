// Dropout where one consumer computes the probabilities and another one uses them: they are not
// negative, so a negative sign marks those that dropout drops.
#pragma once

#include <memeff/core/math.cuh>
#include <memeff/score/dropout.cuh>

namespace memeff {

// Without dropout all of it is empty.
template <class Config, class Grid>
struct DropoutSigns {
  using Element = typename Config::Element;

  // Marks the dropped elements of P^T, at (row, column) of the scores.
  template <class Scores>
  CUTE_DEVICE static void mark(BackwardParams const& params, int batch, int head, int row,
                               int column, Scores& scores) {
    if constexpr (Config::kDropout) {
      Dropout<Config, Grid, true> const dropout(params.dropout, params.mask, batch);
      dropout.for_each_block(dropout_head(params.dropout, batch, head), row, column,
                             [&](int, int row_block, auto const& keep) {
                               CUTE_UNROLL
                               for (int i = 0; i < 8; ++i) {
                                 int const chunk = i / 4;
                                 float& score = scores(i % 4, 0, 2 * row_block + chunk);
                                 score = keep.select(2.0f * score, chunk, i % 4 / 2, i % 2) - score;
                               }
                             });
    }
  }

  // Zeros the marked elements.
  template <class Operand>
  CUTE_DEVICE static void drop(Operand& probabilities) {
    if constexpr (Config::kDropout) {
      CUTE_UNROLL
      for (int i = 0; i < int(sizeof(Operand) / sizeof(uint32_t)); ++i) {
        uint32_t& pair = probabilities.fragments[0][i / 4][i % 4];
        pair = pack<Element>(fmaxf(unpack<Element>(pair, 0), 0.0f),
                             fmaxf(unpack<Element>(pair, 1), 0.0f));
      }
    }
  }

  // dP of an element if it is kept, else 0.
  CUTE_DEVICE static float select(float gradient, float marked) {
    return Config::kDropout && marked < 0.0f ? 0.0f : gradient;
  }
};

}  // namespace memeff
