// An empty stand-in for nvcc's file of this name, which checks the version of the host compiler.
#pragma once
