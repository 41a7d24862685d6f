// In nvcc: which host compilers it works with.
#pragma once
