# weir: `make run` and `make test` are all that a fresh machine with Go and make needs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DATA    ?= ./weir-data
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -X github.com/weirhq/weir/internal/obs.version=$(VERSION)

# Modules beside the main one: rivals in benchmarks and linters are no dependencies of weir.
BENCH := $(dir $(wildcard internal/bench/go.mod))

# The race detector runs where goroutines meet. The rest is arithmetic, other processes, or too slow under it to say more.
RACE ?= $$(go list ./... | grep -v -e /schemas/weirpb -e /enforcer/bucket$$ -e /cmd/e2e$$ -e /cmd/chaos$$ -e /internal/embedded \
	-e /aggregator/clickhouse$$ -e /cmd/internal/accuracy$$ -e /ingest/spool$$)

.PHONY: help
help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: run
run: libchdb build ## install what is missing, build, and run the whole pipeline with generated traffic (data in DATA)
	@deploy/install-apt.sh redis-server redis-server || echo "going on with miniredis" >&2
	@exec bin/weir up --data "$(DATA)" --load

.PHONY: test
test: servers ## install what is missing and run every test, real servers included, then again under the race detector
	go test -timeout 20m ./...
	@deploy/install-apt.sh gcc gcc libc6-dev
	CGO_ENABLED=1 GORACE=atexit_sleep_ms=0 go test -race -timeout 15m $(RACE)

.PHONY: test-short
test-short: ## run the tests that need no server
	go test -timeout 5m $$(go list -test -f '{{.ImportPath}} {{join .Deps " "}}' ./... | grep '^[^ ]*\.test ' | grep -v -e weir/internal/embedded -e /cmd/e2e | sed 's/\.test .*//')

.PHONY: build
build: ## build bin/weir
	go build -ldflags '$(LDFLAGS)' -o bin/weir ./cmd/weir

.PHONY: lint
lint: bin/tools/golangci-lint ## gofmt, vet, staticcheck, errcheck and more
	bin/tools/golangci-lint run
	$(if $(BENCH),cd $(BENCH) && "$(CURDIR)/bin/tools/golangci-lint" run --config "$(CURDIR)/.golangci.yml")

.PHONY: gen
gen: bin/tools/protoc-gen-go ## generate schemas/weirpb from schemas/proto; leaves no diff
	@deploy/install-apt.sh protoc protobuf-compiler
	protoc --plugin=bin/tools/protoc-gen-go -I schemas/proto --go_out=. --go_opt=module=github.com/weirhq/weir schemas/proto/weir/v1/*.proto

.PHONY: bench
bench: servers ## run every benchmark, also those beside rivals (COUNT times); the 100 million rows of history take half an hour, an outage of NATS ten minutes
	go test -run '^$$' -bench . -benchmem -count $(or $(COUNT),1) -timeout 120m ./...
	$(if $(BENCH),cd $(BENCH) && go test -run '^$$' -bench . -benchmem -count $(or $(COUNT),1) -timeout 120m ./...)

.PHONY: bench-smoke
bench-smoke: servers ## run every benchmark once, and fail when a decision costs more than twice the floor
	WEIR_HISTORY_ROWS=1000000 WEIR_AWAY=5s go test -run '^$$' -bench . -benchtime 1x -timeout 10m ./...
	$(if $(BENCH),cd $(BENCH) && go test -bench . -benchtime 1x -timeout 10m ./...)

.PHONY: chaos
chaos: servers build ## break real processes at random and count: SEEDS runs (3), from SEED (1) on; nothing may be lost or doubled
	@go build -o bin/chaos ./cmd/chaos
	@bin/chaos -weir bin/weir -seeds $(or $(SEEDS),3) -seed $(or $(SEED),1) $(CHAOS)

.PHONY: servers
servers: libchdb
	@deploy/install-apt.sh redis-server redis-server
	@PATH="$$PATH:/usr/sbin" deploy/install-apt.sh nginx nginx-light

.PHONY: libchdb
libchdb: ## put the ClickHouse engine into the cache (178 MB from npm, once)
	@deploy/install-libchdb.sh

.PHONY: tools
tools: bin/tools/golangci-lint bin/tools/protoc-gen-go ## build the linters and the generator at their pinned versions

bin/tools/golangci-lint: internal/tools/go.mod internal/tools/go.sum
	cd internal/tools && go build -o ../../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

bin/tools/protoc-gen-go: go.mod
	go build -o $@ google.golang.org/protobuf/cmd/protoc-gen-go

.PHONY: clean
clean: ## remove what was built; data and caches stay
	rm -rf bin
