// Command chaos runs the pipeline as real processes, breaks every part of it in turn, and counts: what callers were answered
// must be in the history once each, and in Redis.
//
// A seed decides what breaks when. The last line of the output is the sum over all seeds; the exit code is 1 when anything was
// lost or doubled, or when a run could not be judged. `make chaos SEEDS=200 [SEED=first]` runs it.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weirhq/weir/cmd/internal/rig"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, out, talk io.Writer) int {
	flags := flag.NewFlagSet("chaos", flag.ContinueOnError)
	flags.SetOutput(talk)
	seeds := flags.Int("seeds", 3, "number of runs")
	first := flags.Uint64("seed", 1, "seed of the first run; the next ones follow")
	lanes := flags.Int("lanes", 2, "runs side by side")
	binary := flags.String("weir", "bin/weir", "the weir to break")
	data := flags.String("data", "", "folder for the runs; those that fail stay (a temporary one)")
	spare := flags.String("spare", "", "parts, separated by commas, that are neither killed nor terminated")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	dir := *data
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "weir-chaos"); err != nil {
			fmt.Fprintln(talk, err)
			return 1
		}
	}
	var spared []string
	if *spare != "" {
		spared = strings.Split(*spare, ",")
	}

	var all sync.WaitGroup
	var mu sync.Mutex // guards what follows
	var sum result
	failed, next := 0, 0
	for range max(*lanes, 1) {
		all.Go(func() {
			for {
				mu.Lock()
				seed := *first + uint64(next)
				done := next >= *seeds
				next++
				mu.Unlock()
				if done {
					return
				}
				home := filepath.Join(dir, fmt.Sprintf("seed-%d", seed))
				res := runSeed(home, *binary, newPlan(seed, spared...))
				mu.Lock()
				sum.add(res)
				fmt.Fprintln(out, res)
				if len(res.problems) > 0 {
					failed++
					for _, p := range res.problems {
						fmt.Fprintf(out, "  %s\n", p)
					}
					fmt.Fprintf(out, "  replay: make chaos SEEDS=1 SEED=%d   logs and data: %s\n", seed, home)
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if failed == 0 {
		if *data == "" { // ours, and empty
			if err := os.Remove(dir); err != nil {
				fmt.Fprintln(talk, err)
			}
		}
	} else {
		fmt.Fprintf(out, "%d of %d seeds failed\n", failed, *seeds)
	}
	fmt.Fprintf(out, "chaos: seeds %d, requests %d, unanswered %d, lost %d, doubled %d\n", *seeds, sum.requests, sum.unanswered, sum.lost, sum.doubled)
	if failed > 0 || sum.lost > 0 || sum.doubled > 0 {
		return 1
	}
	return 0
}

// result is what came of one seed.
type result struct {
	seed                                uint64
	requests, unanswered, lost, doubled uint64
	behind                              uint64 // what killed gateways never told Redis
	faults                              int
	took, drained                       time.Duration
	problems                            []string // why it failed
}

func (r *result) add(o result) {
	r.requests += o.requests
	r.unanswered += o.unanswered
	r.lost += o.lost
	r.doubled += o.doubled
	r.behind += o.behind
}

func (r result) String() string {
	word := "ok"
	if len(r.problems) > 0 {
		word = "FAILED"
	}
	return fmt.Sprintf("seed %d: %d faults, requests %d, unanswered %d, lost %d, doubled %d, Redis behind %d, drained in %.1fs of %.1fs: %s", r.seed, r.faults,
		r.requests, r.unanswered, r.lost, r.doubled, r.behind, r.drained.Seconds(), r.took.Seconds(), word)
}

// runSeed is one run. Its folder is removed when all is well.
func runSeed(dir, binary string, p plan) (res result) {
	res = result{seed: p.Seed, faults: len(p.Faults)}
	began := time.Now()
	if err := os.RemoveAll(dir); err != nil { // of an earlier run of this seed
		res.problems = append(res.problems, err.Error())
		return res
	}
	r, err := rig.New(rig.Config{Dir: dir, Binary: binary, Gateways: p.Gateways})
	defer func() {
		r.Close()
		res.problems = append(res.problems, r.Notes()...)
		if res.took = time.Since(began); len(res.problems) == 0 {
			if err := os.RemoveAll(dir); err != nil {
				res.problems = append(res.problems, err.Error())
			}
		}
	}()
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "plan.txt"), []byte(p.String()), 0o644)
	}
	if err == nil {
		err = judge(r, dir, p, &res)
	}
	if err != nil {
		res.problems = append(res.problems, err.Error())
	}
	return res
}
