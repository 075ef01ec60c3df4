// Package conf reads settings that must not leak: secrets, and addresses that carry them.
package conf

import (
	"fmt"
	"net/url"
	"os"
	"strings"
)

// Secret is a text that prints as ***.
type Secret string

func (Secret) String() string               { return "***" }
func (Secret) GoString() string             { return "***" }
func (Secret) MarshalText() ([]byte, error) { return []byte("***"), nil }

// Reveal is the text itself.
func (s Secret) Reveal() string { return string(s) }

// Env reads a secret from the variable name, or from the file that name_FILE points to. None is empty.
func Env(name string) (Secret, error) {
	if v := os.Getenv(name); v != "" {
		return Secret(v), nil
	}
	file := os.Getenv(name + "_FILE")
	if file == "" {
		return "", nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", fmt.Errorf("read %s_FILE: %w", name, err)
	}
	return Secret(strings.TrimSpace(string(b))), nil
}

// Redact returns address without its password, for logs and errors. What does not parse is not shown at all.
func Redact(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return "(an address that does not parse)"
	}
	if q := u.Query(); q.Has("password") {
		q.Set("password", "xxxxx")
		u.RawQuery = q.Encode()
	}
	return u.Redacted()
}
