namespace memeff::function {

struct ScoreFunction {
  static constexpr bool kUsesScore = false;
  static constexpr bool kDependsOnBatch = true;
  static constexpr bool kDependsOnHead = false;
  static constexpr bool kDependsOnQuery = true;
  static constexpr bool kDependsOnKey = true;

  struct OfHead {
    int const* v5;
    int v19;
  };

  template <class Arrays>
  CUTE_DEVICE static OfHead of_head(Arrays const& arrays, int batch, int head) {
    int const* const v5 = arrays.template data<0, int>();
    int const v15 = arrays.template size<1, 0>();
    int const v16 = clamp_index(batch, v15);
    short const* const v17 = arrays.template data<1, short>();
    short const* const v18 = v17 + v16;
    int const v19 = load<int>(v18);
    return {v5, v19};
  }

  struct OfRow {
    int v7;
  };

  template <class Arrays>
  CUTE_DEVICE static OfRow of_row(Arrays const& arrays, OfHead const& of_head, int query) {
    int const v3 = arrays.template size<0, 0>();
    int const v4 = clamp_index(query, v3);
    int const* const v6 = of_head.v5 + v4;
    int const v7 = load<int>(v6);
    return {v7};
  }

  struct OfColumn {
    int v12;
  };

  template <class Arrays>
  CUTE_DEVICE static OfColumn of_column(Arrays const& arrays, OfHead const& of_head, int key) {
    int const v3 = arrays.template size<0, 0>();
    int const v10 = clamp_index(key, v3);
    int const* const v11 = of_head.v5 + v10;
    int const v12 = load<int>(v11);
    return {v12};
  }

  template <class Arrays>
  CUTE_DEVICE static bool value(Arrays const& arrays, OfHead const& of_head, OfRow const& of_row,
                                OfColumn const& of_column, float score, int query, int key) {
    bool const v14 = of_row.v7 == of_column.v12;
    bool const v21 = key < of_head.v19;
    bool const v22 = bool(v14 | v21);
    return v22;
  }
};

}  // namespace memeff::function
