package conf

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSecretNeverPrints(t *testing.T) {
	s := Secret("hunter2")
	j, err := json.Marshal(struct{ S Secret }{s})
	if err != nil {
		t.Fatal(err)
	}
	for _, got := range []string{fmt.Sprint(s), fmt.Sprintf("%v %+v %#v %s %q", s, s, s, s, s), string(j)} {
		if strings.Contains(got, "hunter2") {
			t.Errorf("printed %q, want no secret", got)
		}
	}
	if s.Reveal() != "hunter2" {
		t.Errorf("Reveal() = %q", s.Reveal())
	}
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"redis://u:hunter2@h:6379":                      "redis://u:xxxxx@h:6379",
		"clickhouse://h:9000/weir?password=hunter2&x=1": "clickhouse://h:9000/weir?password=xxxxx&x=1",
		"nats://h:4222":                                 "nats://h:4222",
		"://hunter2@":                                   "(an address that does not parse)",
	} {
		if got := Redact(in); got != want {
			t.Errorf("Redact(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestEnvPrefersTheVariableAndTrimsTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte("from-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("WEIR_X_FILE", file)
	if got, err := Env("WEIR_X"); err != nil || got.Reveal() != "from-file" {
		t.Errorf("Env = %q, %v, want the file's text", got.Reveal(), err)
	}
	t.Setenv("WEIR_X", "direct")
	if got, err := Env("WEIR_X"); err != nil || got.Reveal() != "direct" {
		t.Errorf("Env = %q, %v, want the variable", got.Reveal(), err)
	}
	t.Setenv("WEIR_X", "")
	t.Setenv("WEIR_X_FILE", file+"-missing")
	if _, err := Env("WEIR_X"); err == nil || !strings.Contains(err.Error(), "WEIR_X_FILE") {
		t.Errorf("Env of a missing file = %v, want an error that names the variable", err)
	}
}
