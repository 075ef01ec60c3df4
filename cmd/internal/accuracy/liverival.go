package accuracy

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	embeddedredis "github.com/weirhq/weir/internal/embedded/redis"
)

// rivalFleet is a fleet in a process of the rivals' module. Standard input has one line of JSON that says what to start, answered by
// "ready"; then lines "ID GATEWAY KEY", each answered in any order by "ID 1" or "ID 0", and lines "join GATEWAY" and "leave GATEWAY".
// It ends with its input.
type rivalFleet struct {
	dir   string
	redis *embeddedredis.Server // nil unless the rival needs one
	calls redisCalls
	cmd   *exec.Cmd
	in    io.WriteCloser
	done  chan struct{} // closed when the process says no more

	mu      sync.Mutex // guards what follows, and in
	last    int
	waiting map[int]chan bool
}

// rivalStart is the first line.
type rivalStart struct {
	Mode     string `json:"mode"`
	Form     int    `json:"form"` // 0 is Gubernator's token bucket, 1 its leaky bucket
	Gateways int    `json:"gateways"`
	Most     int    `json:"most"`
	Tokens   int64  `json:"tokens"`
	PerMS    int64  `json:"per_ms"`
	Burst    int64  `json:"burst"`
	Redis    string `json:"redis,omitempty"`
}

const rivalStartTimeout = time.Minute

const rivalsBinary = "rivals"

// buildRivals compiles the rivals' module to a file in cfg.Dir.
func buildRivals(ctx context.Context, cfg LiveConfig) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", filepath.Join(cfg.Dir, rivalsBinary), "./rivals")
	build.Dir = cfg.Rivals
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the rivals in %s: %w: %s", cfg.Rivals, err, out)
	}
	return nil
}

func startRival(mode string) func(context.Context, LiveConfig, *scenario, int, *slog.Logger) (liveFleet, error) {
	return func(ctx context.Context, cfg LiveConfig, sc *scenario, form int, log *slog.Logger) (_ liveFleet, err error) {
		f := &rivalFleet{waiting: make(map[int]chan bool), done: make(chan struct{})}
		defer func() {
			if err != nil {
				err = errors.Join(err, f.stop())
			}
		}()
		if f.dir, err = os.MkdirTemp(cfg.Dir, "rival-"); err != nil {
			return nil, err
		}
		start := rivalStart{Mode: mode, Form: form, Gateways: sc.gateways, Most: sc.most, Tokens: sc.tokens, PerMS: sc.per.Milliseconds(), Burst: sc.burst}
		if mode == "redis-per-request" {
			if f.redis, err = embeddedredis.Start(embeddedredis.Config{Dir: f.dir, Real: true}, log); err != nil {
				return nil, err
			}
			start.Redis = f.redis.URL()
			f.calls.url = start.Redis
		}
		f.cmd = exec.Command(filepath.Join(cfg.Dir, rivalsBinary))
		f.cmd.Stderr = os.Stderr
		if f.in, err = f.cmd.StdinPipe(); err != nil {
			return nil, err
		}
		out, err := f.cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if err := f.cmd.Start(); err != nil {
			f.cmd = nil
			return nil, fmt.Errorf("start the rivals: %w", err)
		}
		ready := make(chan struct{})
		go f.listen(out, ready)
		line, err := json.Marshal(start)
		if err != nil {
			return nil, err
		}
		if _, err := fmt.Fprintf(f.in, "%s\n", line); err != nil {
			return nil, fmt.Errorf("start rival %s: %w", mode, err)
		}
		select {
		case <-ready:
			return f, nil
		case <-f.done:
			return nil, fmt.Errorf("rival %s ended before it was ready", mode)
		case <-time.After(rivalStartTimeout):
			return nil, fmt.Errorf("rival %s is not ready", mode)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (f *rivalFleet) listen(out io.Reader, ready chan struct{}) {
	defer close(f.done)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if lines.Text() == "ready" {
			close(ready)
			continue
		}
		id, answer, _ := strings.Cut(lines.Text(), " ")
		n, err := strconv.Atoi(id)
		if err != nil {
			continue
		}
		f.mu.Lock()
		w := f.waiting[n]
		delete(f.waiting, n)
		f.mu.Unlock()
		if w != nil {
			w <- answer == "1"
		}
	}
}

func (f *rivalFleet) ask(gateway, key int) (bool, error) {
	answer := make(chan bool, 1)
	f.mu.Lock()
	f.last++
	f.waiting[f.last] = answer
	_, err := fmt.Fprintf(f.in, "%d %d %d\n", f.last, gateway, key)
	f.mu.Unlock()
	if err != nil {
		return false, fmt.Errorf("ask the rival: %w", err)
	}
	select {
	case ok := <-answer:
		return ok, nil
	case <-f.done:
		return false, errors.New("the rival has ended")
	}
}

func (f *rivalFleet) happen(h happening) error {
	word := ""
	switch h.what {
	case joins:
		word = "join"
	case leaves, vanishes:
		word = "leave"
	}
	if word != "" {
		f.mu.Lock()
		defer f.mu.Unlock()
		_, err := fmt.Fprintf(f.in, "%s %d\n", word, h.gateway)
		return err
	}
	if f.redis != nil {
		return f.calls.happen(f.redis, h)
	}
	return nil
}

// sent counts the calls of Redis. What Gubernator's daemons tell each other nobody counts.
func (f *rivalFleet) sent() (traffic, error) {
	if f.redis == nil {
		return traffic{messages: unknown, bytes: unknown}, nil
	}
	n, err := f.calls.count()
	return traffic{messages: 2 * n, bytes: unknown, redis: n}, err
}

func (f *rivalFleet) stop() error {
	var err error
	if f.cmd != nil {
		err = f.in.Close()
		kill := time.AfterFunc(10*time.Second, func() { _ = f.cmd.Process.Kill() })
		<-f.done
		err = errors.Join(err, f.cmd.Wait())
		kill.Stop()
	}
	if f.redis != nil {
		err = errors.Join(err, f.redis.Stop())
	}
	return errors.Join(err, os.RemoveAll(f.dir))
}
