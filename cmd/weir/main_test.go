package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// weir runs a command line in this process.
func weir(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errOut bytes.Buffer
	code = execute(t.Context(), args, &out, &errOut)
	return out.String(), errOut.String(), code
}

// file writes data under name into a folder of the test.
func file(t *testing.T, name, data string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

const byHeader = `version: 1
identity:
  tenant: {header: X-App-Key}
plans:
  standard: {rate: 1/s, burst: 1}
default_plan: standard
rules:
  - {name: guard, layer: guard, key: [], rate: 1000/s, burst: 1000}
  - {name: contract, layer: contract, key: [tenant], limit: plan}
`

func combined(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "1.1.1.1 - - [17/May/2015:10:05:%02d +0000] \"GET /%d HTTP/1.1\" 200 1\n", i%60, i*i*7919)
	}
	return b.String()
}

func TestSimulateReadsACutLog(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write([]byte(combined(2000))); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	policy := file(t, "policy.yaml", byHeader)
	for _, n := range []int{20, z.Len() / 2} {
		log := file(t, "cut.gz", z.String()[:n])
		out, stderr, code := weir(t, "simulate", "--log", log, "--policy", policy, "-o", "json")
		if code != exitOK || !strings.Contains(out, `"requests"`) || !strings.Contains(stderr, log+": the log ends in the middle") {
			t.Errorf("%d of %d bytes: exit %d, %q, %q", n, z.Len(), code, out, stderr)
		}
	}
}

func TestSimulateWarnsOfALogWithoutTheIdentity(t *testing.T) {
	const warning = "every request is of tenant anonymous: the policy reads the header X-App-Key, which this log does not have"
	policy := file(t, "policy.yaml", byHeader)
	if _, stderr, code := weir(t, "simulate", "--log", file(t, "access.log", combined(3)), "--policy", policy); code != exitOK || !strings.Contains(stderr, warning) {
		t.Errorf("exit %d, %q, want a warning", code, stderr)
	}
	named := combined(1) + `{"ts":1,"path":"/","tenant":"acme"}` + "\n"
	if _, stderr, code := weir(t, "simulate", "--log", file(t, "access.log", named), "--policy", policy); code != exitOK || stderr != "" {
		t.Errorf("with a tenant: exit %d, %q, want no warning", code, stderr)
	}
}

// A terminal does nothing but print, whatever a name holds. JSON is left as it is.
func TestTablesShowNamesAndNothingElse(t *testing.T) {
	log := file(t, "access.log", strings.Repeat(`{"ts":1,"path":"/","tenant":"a\n\u001b[2J\u202eb"}`+"\n", 3))
	policy := file(t, "policy.yaml", byHeader)
	table, _, code := weir(t, "simulate", "--log", log, "--policy", policy)
	if code != exitOK || !strings.Contains(table, `"a\n\x1b[2J\u202eb"`) || strings.ContainsAny(table, "\x1b\u202e") {
		t.Errorf("exit %d, table %q", code, table)
	}
	doc, _, code := weir(t, "simulate", "--log", log, "--policy", policy, "-o", "json")
	if code != exitOK || !strings.Contains(doc, `"a\n\u001b[2J`+"\u202e"+`b"`) {
		t.Errorf("exit %d, JSON %q", code, doc)
	}
	if _, stderr, code := weir(t, "check", "--policy", "no\x1b[2Jne"); code != exitFailed || strings.Contains(stderr, "\x1b") {
		t.Errorf("exit %d, %q, want an error without the escape", code, stderr)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	log, policy := file(t, "access.log", combined(10)), file(t, "policy.yaml", byHeader)
	for _, args := range [][]string{
		{"simulate", "--log", log, "--policy", policy},
		{"replay", "--log", log, "--policy", policy},
		{"load", "--url", "http://127.0.0.1:1", "--duration", "1m"},
	} {
		var out, errOut bytes.Buffer
		if code := execute(ctx, args, &out, &errOut); code != exitFailed || errOut.String() != "weir: interrupted\n" || out.Len() > 0 {
			t.Errorf("%v: exit %d, %q, %q, want only interrupted", args, code, out.String(), errOut.String())
		}
	}
}

func TestUnknownWordsAreUsageErrors(t *testing.T) {
	for _, args := range [][]string{
		{"policy"}, {"policy", "--help"}, {"console", "--help"}, {"switch", "-h"}, {"--help", "policy"}, {"help", "policy"},
		{"usage", "nothing", "--help"}, {"dlq", "x", "-h"}, {"doctor", "x", "--help"},
	} {
		if out, stderr, code := weir(t, args...); code != exitUsage || out != "" || !strings.Contains(stderr, args[len(args)-1]) && !strings.Contains(stderr, args[0]) && !strings.Contains(stderr, args[1]) {
			t.Errorf("weir %v: exit %d, %q, %q, want a usage error that names the word", args, code, out, stderr)
		}
	}
	for _, args := range [][]string{{"--help"}, {"help"}, {"usage", "--help"}, {"help", "usage", "top"}, {"dlq", "show", "--help"}, {"usage", "tenant", "acme", "--help"}} {
		if out, stderr, code := weir(t, args...); code != exitOK || stderr != "" || !strings.Contains(out, "Usage:") {
			t.Errorf("weir %v: exit %d, %q, want the help", args, code, stderr)
		}
	}
}

func TestAddressesAreCheckedFirst(t *testing.T) {
	for _, args := range [][]string{
		{"doctor", "--redis", "foo"}, {"doctor", "--redis", "http://127.0.0.1:6379"}, {"doctor", "--redis", "redis://"}, {"doctor", "--redis", "redis://h:port"},
		{"doctor", "--nats", "redis://127.0.0.1:4222"}, {"doctor", "--nats", "nats://127.0.0.1:4222,://"},
		{"usage", "top", "--clickhouse", "foo"}, {"history", "correct", "--clickhouse", "redis://127.0.0.1", "--gateway", "g", "--tenant", "t", "--route", "r", "--hour", "2026-11-29T10:00:00Z", "--reason", "r", "--by", "b"},
		{"migrate", "--clickhouse", "foo"}, {"aggregator", "--redis", "foo"}, {"alerter", "--nats", "x://y"}, {"dlq", "list", "--nats", "x://y"}, {"up", "--redis", "foo", "--data", t.TempDir()}, {"up", "--spool-max", "much", "--data", t.TempDir()},
		{"gateway", "--upstream", "http://127.0.0.1:1", "--policy", "p", "--nats", "x://y"},
		{"replay", "--log", "l", "--policy", "p", "--clickhouse", "foo"},
		{"load", "--url", "foo"}, {"load", "--url", "http://"}, {"load", "--url", "ftp://127.0.0.1"},
	} {
		if out, stderr, code := weir(t, args...); code != exitUsage || out != "" || !strings.Contains(stderr, "want") {
			t.Errorf("weir %v: exit %d, %q, %q, want a usage error", args, code, out, stderr)
		}
	}
	if _, stderr, _ := weir(t, "doctor", "--redis", "redis//user:secret@h"); strings.Contains(stderr, "secret") {
		t.Errorf("%q shows the password", stderr)
	}
}

func TestLoadThatNobodyAnswers(t *testing.T) {
	out, stderr, code := weir(t, "load", "--url", "http://127.0.0.1:1", "--duration", "300ms", "--every", "100ms")
	if code != exitUnreachable || !strings.Contains(stderr, "http://127.0.0.1:1") {
		t.Errorf("exit %d, %q, %q, want %d", code, out, stderr, exitUnreachable)
	}
}
