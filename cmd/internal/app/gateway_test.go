package app

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// A gateway that cannot keep usage on disk goes on, and says so with each sign of life: alerting pages for it.
func TestAGatewayWithoutItsSpoolSaysSo(t *testing.T) {
	log, m, stack := embeddedtest.Log(t), NewMetrics(), &run.Stack{}
	t.Cleanup(func() {
		if err := stack.Stop(StopTimeout); err != nil {
			t.Error(err)
		}
	})
	nc, err := Connect(t.Context(), embeddedtest.NATS(t).URL(), "test", true, m, stack, log)
	if err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	file := filepath.Join(data, "policy.yaml")
	if err := os.WriteFile(file, []byte("version: 1\nrules:\n  - {name: guard, layer: guard, key: [], rate: 1000/s, burst: 1000}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	policy, err := NewPolicy(file, m, log)
	if err != nil {
		t.Fatal(err)
	}
	in := spoolDir(data, "broken")
	if err := os.MkdirAll(filepath.Dir(in), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(in, []byte("no folder"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{"broken": {schemas.WithoutSpool}, "well": nil} {
		beats, err := nc.SubscribeSync(schemas.HeartbeatPrefix + name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := NewGateway(GatewayConfig{Name: name, Data: data}, policy, nc, m, stack, log); err != nil {
			t.Fatal(err)
		}
		msg, err := beats.NextMsg(30 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		h, err := schemas.DecodeHeartbeat(msg.Subject, msg.Data)
		if err != nil || !slices.Equal(h.Without, want) {
			t.Errorf("%s says that it does without %q, %v, want %q", name, h.Without, err, want)
		}
	}
}
