// Package e2e tests the whole system: the weir binary and its parts over real servers.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/alerting/webhook"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/schemas"
)

// binary is the weir that the tests run.
var binary string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	dir, err := os.MkdirTemp("", "weir-e2e")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	binary = filepath.Join(dir, "weir")
	if out, err := exec.Command("go", "build", "-o", binary, "../weir").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build weir: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// command is weir with arguments, in an environment without settings of weir but those given.
func command(env []string, args ...string) *exec.Cmd {
	cmd := exec.Command(binary, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "WEIR_") || strings.HasPrefix(v, "WEIR_LIBCHDB=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// weir runs a command to its end and returns what it printed and its exit code.
func weir(t testing.TB, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := command(env, args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("weir %v: %v", args, err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// process is a weir that keeps running.
type process struct {
	t    testing.TB
	cmd  *exec.Cmd
	done chan struct{}

	mu  sync.Mutex
	log []string // lines of standard error
}

// start runs weir until the test ends. It is up once a line of its log or output contains ready.
func start(t testing.TB, ready string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: command(env, args...), done: make(chan struct{})}
	errOut, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = io.Discard
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	up := make(chan struct{})
	go func() {
		defer close(p.done)
		var once sync.Once
		for s := bufio.NewScanner(errOut); s.Scan(); {
			p.mu.Lock()
			p.log = append(p.log, s.Text())
			p.mu.Unlock()
			if strings.Contains(s.Text(), ready) {
				once.Do(func() { close(up) })
			}
		}
		_ = p.cmd.Wait() // the exit code is in ProcessState
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.done
		if t.Failed() {
			t.Logf("log of weir %v:\n%s", args, strings.Join(p.lines(), "\n"))
		}
	})
	select {
	case <-up:
	case <-p.done:
		t.Fatalf("weir %v ended: %s", args, strings.Join(p.lines(), "\n"))
	case <-time.After(time.Minute):
		t.Fatalf("weir %v was not ready in a minute: %s", args, strings.Join(p.lines(), "\n"))
	}
	return p
}

func (p *process) lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.log...)
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// stop ends the process with a signal and returns its exit code.
func (p *process) stop(s syscall.Signal) int {
	p.t.Helper()
	p.signal(s)
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Fatalf("weir did not end on %v", s)
	}
	return p.cmd.ProcessState.ExitCode()
}

// eventually waits until f says that it holds. The deadline only ends a test that has failed.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after a minute still not: %s", what)
		}
	}
}

// endpoints are those of a `weir up` with its state in data.
func endpoints(t testing.TB, data string) app.Endpoints {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(data, app.EndpointsFile))
	if err != nil {
		t.Fatal(err)
	}
	var e app.Endpoints
	if err := json.Unmarshal(b, &e); err != nil {
		t.Fatal(err)
	}
	return e
}

// anyPorts lets a weir choose its ports.
var anyPorts = []string{"--gateway-addr", "127.0.0.1:0", "--check-addr", "127.0.0.1:0", "--metrics-addr", "127.0.0.1:0"}

// write puts text into a file of the test and returns its name.
func write(t testing.TB, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// query asks a ClickHouse for one text, over HTTP and without any of weir's code.
func query(t testing.TB, url, sql string) string {
	t.Helper()
	base, db := url[:strings.LastIndex(url, "/")], url[strings.LastIndex(url, "/")+1:]
	resp, err := http.Post(base+"/?database="+db, "text/plain", strings.NewReader(sql))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %s %v", sql, resp.StatusCode, b, err)
	}
	return strings.TrimSpace(string(b))
}

// get sends one request as a tenant.
func get(t testing.TB, url, tenant string) (status int, header http.Header, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-App-Key", tenant)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// secret signs what the tests' on-call receives.
const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// oncall is a webhook receiver that accepts only what is signed.
type oncall struct {
	*httptest.Server
	mu     sync.Mutex
	alerts []schemas.Alert
	ids    map[string]int
	at     []time.Time
}

func newOncall(t testing.TB) *oncall {
	o := &oncall{ids: map[string]int{}}
	o.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			err = webhook.Verify(r.Header, body, time.Now(), conf.Secret(secret))
		}
		a, decodeErr := schemas.DecodeAlert(body)
		if err = errors.Join(err, decodeErr); err != nil {
			t.Errorf("on-call received what it does not accept: %v: %s", err, body)
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.alerts, o.at = append(o.alerts, *a), append(o.at, time.Now())
		o.ids[r.Header.Get(webhook.HeaderID)]++
	}))
	t.Cleanup(o.Close)
	return o
}

// find returns the first alert of that type, name and tenant, and when it came.
func (o *oncall) find(typ, name, tenant string) (schemas.Alert, time.Time, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, a := range o.alerts {
		if a.Type == typ && a.Name == name && a.Tenant == tenant {
			return a, o.at[i], true
		}
	}
	return schemas.Alert{}, time.Time{}, false
}

// since returns when the first alert with that dedup key began to fire after then.
func (o *oncall) since(key string, then time.Time) (time.Time, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, a := range o.alerts {
		if a.Type == schemas.AlertFiring && a.DedupKey == key && o.at[i].After(then) {
			return o.at[i], true
		}
	}
	return time.Time{}, false
}

// open are the dedup keys of that name that fire and are not resolved.
func (o *oncall) open(name string) (keys []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	fires := map[string]bool{}
	for _, a := range o.alerts {
		if a.Name == name {
			fires[a.DedupKey] = a.Type == schemas.AlertFiring
		}
	}
	for key, f := range fires {
		if f {
			keys = append(keys, key)
		}
	}
	return keys
}

// accessLog is a real web server's log where there is one beside the repository, else one of the same size and shape.
func accessLog(t testing.TB) (file string, requests int) {
	t.Helper()
	const real = "../../../shared/data/access.log.gz"
	if _, err := os.Stat(real); err == nil {
		return real, 10_000
	}
	rng := rand.New(rand.NewPCG(1, 1))
	var b strings.Builder
	at := time.Date(2015, 5, 17, 10, 5, 3, 0, time.UTC)
	for range 10_000 {
		at = at.Add(time.Duration(rng.IntN(70)) * time.Second)
		client := int(rng.ExpFloat64() * 200)
		fmt.Fprintf(&b, "198.18.%d.%d - - [%s] \"GET /presentations/%d HTTP/1.1\" 200 1 \"-\" \"-\"\n", client/256, client%256, at.Format("02/Jan/2006:15:04:05 -0700"), rng.IntN(9))
	}
	return write(t, "access.log", b.String()), 10_000
}

// bounded is a context that ends with the test, or when it has clearly failed.
func bounded(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

type endpointsT = app.Endpoints

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// fetch gets a page.
func fetch(t testing.TB, url string) string {
	t.Helper()
	status, _, body := get(t, url, "")
	if status != http.StatusOK {
		t.Fatalf("%s: %d %s", url, status, body)
	}
	return body
}

// newRig starts the pipeline as processes that end with the test. What nobody should have seen fails it, and a test that fails shows
// what they logged.
func newRig(t testing.TB, cfg rig.Config) *rig.Rig {
	t.Helper()
	cfg.Dir, cfg.Binary = t.TempDir(), binary
	r, err := rig.New(cfg)
	t.Cleanup(func() {
		r.Close()
		for _, n := range r.Notes() {
			t.Error(n)
		}
		if t.Failed() {
			logs(t, cfg.Dir)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// logs shows the logs of a rig.
func logs(t testing.TB, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		t.Error(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			t.Logf("%s:\n%s", filepath.Base(f), b)
		}
	}
}
