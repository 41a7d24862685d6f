namespace memeff::function {

struct ScoreFunction {
  static constexpr bool kUsesScore = true;
  static constexpr bool kDependsOnBatch = false;
  static constexpr bool kDependsOnHead = true;
  static constexpr bool kDependsOnQuery = true;
  static constexpr bool kDependsOnKey = true;
  static constexpr bool kConstantDerivative = false;
  static constexpr int kFloatReads = 1;
  static constexpr int kReadArrays[] = {0};
  static constexpr bool kReadsDependOnQuery[] = {true};
  static constexpr bool kReadsDependOnKey[] = {true};
  static constexpr bool kReadsConstantAlongDiagonals[] = {true};

  struct OfHead {
    float v7;
    int v10;
    cutlass::bfloat16_t const* v17;
    long long v21;
    bool v23;
  };

  template <class Arrays>
  CUTE_DEVICE static OfHead of_head(Arrays const& arrays, int batch, int head) {
    float const v7 = arrays.template literal<0, float>();
    int const v10 = arrays.template literal<1, int>();
    int const v12 = arrays.template size<0, 0>();
    int const v14 = clamp_index(head, v12);
    cutlass::bfloat16_t const* const v16 = arrays.template data<0, cutlass::bfloat16_t>();
    cutlass::bfloat16_t const* const v17 = v16 + v14 * arrays.template stride<0, 0>();
    long long const v21 = 0 + v14 * arrays.template stride<0, 0>();
    bool const v23 = in_bounds(head, v12);
    return {v7, v10, v17, v21, v23};
  }

  struct OfRow {};

  template <class Arrays>
  CUTE_DEVICE static OfRow of_row(Arrays const& arrays, OfHead const& of_head, int query) {
    return {};
  }

  struct OfColumn {};

  template <class Arrays>
  CUTE_DEVICE static OfColumn of_column(Arrays const& arrays, OfHead const& of_head, int key) {
    return {};
  }

  template <class Arrays>
  CUTE_DEVICE static float value(Arrays const& arrays, OfHead const& of_head, OfRow const& of_row,
                                 OfColumn const& of_column, float score, int query, int key) {
    float const v5 = score * 0x1.47ae14p-6f;
    float const v6 = tanh_approx(v5);
    float const v8 = of_head.v7 * v6;
    int const v9 = wrapping_subtract(query, key);
    int const v11 = wrapping_add(v9, of_head.v10);
    int const v13 = arrays.template size<0, 1>();
    int const v15 = clamp_index(v11, v13);
    cutlass::bfloat16_t const* const v18 = of_head.v17 + v15;
    float const v19 = load<float>(v18);
    bool const v24 = in_bounds(v11, v13);
    bool const v25 = of_head.v23 && v24;
    float const v27 = v25 ? v19 : 0.0f;
    float const v30 = arrays.template read<0>(v27);
    float const v31 = v8 + v30;
    return v31;
  }

  template <class Arrays>
  CUTE_DEVICE static float derivative(Arrays const& arrays, OfHead const& of_head,
                                      OfRow const& of_row, OfColumn const& of_column, float score,
                                      int query, int key) {
    float const v5 = score * 0x1.47ae14p-6f;
    float const v6 = tanh_approx(v5);
    float const v33 = v6 * v6;
    float const v34 = 1.0f - v33;
    float const v35 = of_head.v7 * v34;
    float const v36 = v35 * 0x1.47ae14p-6f;
    return v36;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_values(
      Arrays const& arrays, OfHead const& of_head, OfRow const& of_row, OfColumn const& of_column,
      float score, int query, int key, float (&read_values)[kFloatReads]) {
    int const v9 = wrapping_subtract(query, key);
    int const v11 = wrapping_add(v9, of_head.v10);
    int const v13 = arrays.template size<0, 1>();
    int const v15 = clamp_index(v11, v13);
    cutlass::bfloat16_t const* const v18 = of_head.v17 + v15;
    float const v19 = load<float>(v18);
    bool const v24 = in_bounds(v11, v13);
    bool const v25 = of_head.v23 && v24;
    float const v27 = v25 ? v19 : 0.0f;
    float const v30 = arrays.template read<0>(v27);
    read_values[0] = v30;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_derivatives(Arrays const& arrays, OfHead const& of_head,
                                           OfRow const& of_row, OfColumn const& of_column,
                                           float score, int query, int key,
                                           float (&read_derivatives)[kFloatReads]) {
    read_derivatives[0] = 1.0f;
  }

  template <class Arrays>
  CUTE_DEVICE static void read_offsets(Arrays const& arrays, OfHead const& of_head,
                                       OfRow const& of_row, OfColumn const& of_column, float score,
                                       int query, int key, long long (&read_offsets)[kFloatReads]) {
    int const v9 = wrapping_subtract(query, key);
    int const v11 = wrapping_add(v9, of_head.v10);
    int const v13 = arrays.template size<0, 1>();
    int const v15 = clamp_index(v11, v13);
    long long const v22 = of_head.v21 + v15;
    bool const v24 = in_bounds(v11, v13);
    bool const v25 = of_head.v23 && v24;
    long long const v29 = v25 ? v22 : -1;
    read_offsets[0] = v29;
  }
};

}  // namespace memeff::function
