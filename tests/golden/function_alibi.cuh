namespace memeff::function {

struct ScoreFunction {
  static constexpr bool kUsesScore = true;
  static constexpr bool kDependsOnBatch = false;
  static constexpr bool kDependsOnHead = true;
  static constexpr bool kDependsOnQuery = true;
  static constexpr bool kDependsOnKey = true;
  static constexpr bool kConstantDerivative = true;
  static constexpr int kFloatReads = 1;
  static constexpr int kReadArrays[] = {0};
  static constexpr bool kReadsDependOnQuery[] = {false};
  static constexpr bool kReadsDependOnKey[] = {false};
  static constexpr bool kReadsConstantAlongDiagonals[] = {true};

  struct OfHead {
    float v12;
    long long v14;
  };

  template <class Arrays>
  CUTE_DEVICE static OfHead of_head(Arrays const& arrays, int batch, int head) {
    bool const v5 = head < 0;
    int const v6 = arrays.template size<0, 0>();
    int const v7 = wrapping_add(head, v6);
    int const v8 = v5 ? v7 : head;
    int const v9 = clamp_index(v8, v6);
    float const* const v10 = arrays.template data<0, float>();
    float const* const v11 = v10 + v9;
    float const v12 = load<float>(v11);
    long long const v14 = 0 + v9;
    return {v12, v14};
  }

  struct OfRow {
  };

  template <class Arrays>
  CUTE_DEVICE static OfRow of_row(Arrays const& arrays, OfHead const& of_head, int query) {
    return {};
  }

  struct OfColumn {
  };

  template <class Arrays>
  CUTE_DEVICE static OfColumn of_column(Arrays const& arrays, OfHead const& of_head, int key) {
    return {};
  }

  template <class Arrays>
  CUTE_DEVICE static float value(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key) {
    float const v16 = arrays.difference(key, query);
    float const v17 = of_head.v12 * v16;
    float const v18 = score + v17;
    return v18;
  }

  template <class Arrays>
  CUTE_DEVICE static float derivative(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key) {
    return 1.0f;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_values(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key, float (&read_values)[kFloatReads]) {
    read_values[0] = of_head.v12;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_derivatives(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key, float (&read_derivatives)[kFloatReads]) {
    float const v16 = arrays.difference(key, query);
    read_derivatives[0] = v16;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_offsets(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key, long long (&read_offsets)[kFloatReads]) {
    read_offsets[0] = of_head.v14;
  }
};

}  // namespace memeff::function
