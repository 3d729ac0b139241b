// Which of a kernel's two texts is compiled: the generic one keeps the sizes of a problem in registers, the specialised
// one has them as constants.
#include "common/types.cuh"

template <typename Text>
constexpr bool is_specialised_text = false;
template <>
constexpr bool is_specialised_text<Specialised> = true;
constexpr bool is_specialised = is_specialised_text<text_t>;
