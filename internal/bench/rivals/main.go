// Command rivals runs redis_rate or Gubernator daemons for `weir bench accuracy --live --rivals internal/bench`, which asks it on
// standard input and reads its answers on standard output. The protocol is in cmd/internal/accuracy, file liverival.go.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/gubernator-io/gubernator/v2"
	"github.com/redis/go-redis/v9"
	"github.com/sirupsen/logrus"
)

// start is the first line of the input.
type start struct {
	Mode     string `json:"mode"`
	Form     int    `json:"form"`
	Gateways int    `json:"gateways"`
	Most     int    `json:"most"`
	Tokens   int64  `json:"tokens"`
	PerMS    int64  `json:"per_ms"`
	Burst    int64  `json:"burst"`
	Redis    string `json:"redis"`
}

// rival is a fleet. It lives as long as the process: Gubernator takes its time to close, and nobody waits for that.
type rival interface {
	ask(gateway int, key string) bool
	member(gateway int, joins bool) error
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "rivals: %v\n", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	lines := bufio.NewScanner(in)
	if !lines.Scan() {
		return fmt.Errorf("read what to start: %w", io.ErrUnexpectedEOF)
	}
	var s start
	if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
		return fmt.Errorf("read what to start: %w", err)
	}
	var r rival
	var err error
	switch s.Mode {
	case "redis-per-request":
		r, err = newRedisRate(s)
	case "gubernator-global":
		r, err = newGubernator(s)
	default:
		err = fmt.Errorf("no rival %q", s.Mode)
	}
	if err != nil {
		return err
	}

	var mu sync.Mutex // out
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = fmt.Fprintf(out, format, args...) // whoever does not listen has ended, and so will the input
	}
	say("ready\n")
	var wg sync.WaitGroup
	defer wg.Wait()
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		switch {
		case len(f) == 2:
			gateway, err := strconv.Atoi(f[1])
			if err != nil {
				return fmt.Errorf("line %q: %w", lines.Text(), err)
			}
			if err := r.member(gateway, f[0] == "join"); err != nil {
				return err
			}
		case len(f) == 3:
			gateway, err := strconv.Atoi(f[1])
			if err != nil {
				return fmt.Errorf("line %q: %w", lines.Text(), err)
			}
			wg.Go(func() {
				answer := 0
				if r.ask(gateway, f[2]) {
					answer = 1
				}
				say("%s %d\n", f[0], answer)
			})
		}
	}
	return lines.Err()
}

// redisRate asks go-redis/redis_rate. While Redis is down requests pass.
type redisRate struct {
	limiter *redis_rate.Limiter
	limit   redis_rate.Limit
}

func newRedisRate(s start) (*redisRate, error) {
	o, err := redis.ParseURL(s.Redis)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", err)
	}
	o.PoolSize = 64
	c := redis.NewClient(o)
	return &redisRate{limiter: redis_rate.NewLimiter(c),
		limit: redis_rate.Limit{Rate: int(s.Tokens), Burst: int(s.Burst), Period: time.Duration(s.PerMS) * time.Millisecond}}, nil
}

func (r *redisRate) ask(_ int, key string) bool {
	res, err := r.limiter.Allow(context.Background(), key, r.limit)
	return err != nil || res.Allowed > 0
}

func (r *redisRate) member(int, bool) error { return nil }

// daemons are Gubernator daemons, one for each gateway, which asks its own in process. Settings are the defaults.
type daemons struct {
	request gubernator.RateLimitReq
	all     []*gubernator.Daemon
	up      []bool
}

func newGubernator(s start) (*daemons, error) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	d := &daemons{all: make([]*gubernator.Daemon, s.Most), up: make([]bool, s.Most),
		request: gubernator.RateLimitReq{Name: "contract", Hits: 1, Limit: s.Tokens, Duration: s.PerMS, Burst: s.Burst,
			Algorithm: gubernator.Algorithm(s.Form), Behavior: gubernator.Behavior_GLOBAL}}
	for i := range d.all {
		grpc, err := free()
		if err != nil {
			return nil, err
		}
		http, err := free()
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		d.all[i], err = gubernator.SpawnDaemon(ctx, gubernator.DaemonConfig{Logger: log.WithField("gateway", i), InstanceID: grpc,
			GRPCListenAddress: grpc, HTTPListenAddress: http, AdvertiseAddress: grpc})
		cancel()
		if err != nil {
			return nil, fmt.Errorf("start gubernator %d: %w", i, err)
		}
		d.all[i].PeerInfo = gubernator.PeerInfo{GRPCAddress: grpc, HTTPAddress: http}
		d.up[i] = i < s.Gateways
	}
	d.tell()
	return d, nil
}

// free is an address that was free a moment ago.
func free() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}

// tell tells every daemon who is there.
func (d *daemons) tell() {
	var peers []gubernator.PeerInfo
	for i, up := range d.up {
		if up {
			peers = append(peers, d.all[i].PeerInfo)
		}
	}
	for i, up := range d.up {
		if up {
			d.all[i].SetPeers(peers)
		}
	}
}

func (d *daemons) ask(gateway int, key string) bool {
	r := gubernator.RateLimitReq{Name: d.request.Name, UniqueKey: key, Hits: d.request.Hits, Limit: d.request.Limit, Duration: d.request.Duration,
		Burst: d.request.Burst, Algorithm: d.request.Algorithm, Behavior: d.request.Behavior}
	res, err := d.all[gateway].V1Server.GetRateLimits(context.Background(), &gubernator.GetRateLimitsReq{Requests: []*gubernator.RateLimitReq{&r}})
	if err != nil || res.Responses[0].Error != "" {
		return true // as with a Redis that is down
	}
	return res.Responses[0].Status == gubernator.Status_UNDER_LIMIT
}

func (d *daemons) member(gateway int, joins bool) error {
	d.up[gateway] = joins
	d.tell()
	return nil
}
