// This file lets the compiler accept the functions without body in pin.go.
