# Ocihold. 'make help' lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

TAGS := containers_image_openpgp exclude_graphdriver_btrfs exclude_graphdriver_devicemapper
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
CLI := github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/cli
LDFLAGS := -s -w -X $(CLI).Version=$(VERSION)
PREFIX ?= /usr
DESTDIR ?=
FUZZTIME ?= 10s
# A release that is known to build; a cold build takes minutes and is kept.
GOLANGCI := v2.15.0
TOOLS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ocihold-test/tools

.PHONY: help build install uninstall deps node demo test test-faults unit integration bats kubelet race bench soak fuzz lint fmt clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: ## Build bin/ocihold and bin/ocihold-guard
	CGO_ENABLED=0 go build -trimpath -tags "$(TAGS)" -ldflags "$(LDFLAGS)" -o bin/ ./nriplugin/cmd/ocihold ./nriplugin/cmd/ocihold-guard

install: build ## Install both programs, the service and the man page below DESTDIR and PREFIX
	install -D -m 0755 bin/ocihold $(DESTDIR)$(PREFIX)/bin/ocihold
	install -D -m 0755 bin/ocihold-guard $(DESTDIR)$(PREFIX)/libexec/ocihold/ocihold-guard
	install -D -m 0644 contrib/systemd/ocihold.service $(DESTDIR)$(PREFIX)/lib/systemd/system/ocihold.service
	install -D -m 0644 contrib/man/ocihold.8 $(DESTDIR)$(PREFIX)/share/man/man8/ocihold.8

deps: ## Install the Debian packages that the real node needs
	@test/deps.sh

node: deps ## Boot a real node in the foreground and print its exports; Ctrl-C ends it
	@CGO_ENABLED=0 go -C test run ./node up --foreground

demo: deps ## Show an image volume on a real CRI-O, from pull to release
	@contrib/demo.sh

test: deps unit integration bats ## Run everything at its scaled count

unit: ## Vet, and test the packages
	CGO_ENABLED=0 go vet -tags "$(TAGS)" ./...
	CGO_ENABLED=0 go test -tags "$(TAGS)" -count=1 ./...
	CGO_ENABLED=0 go -C test/policy test -count=1 ./...
	@$(MAKE) --no-print-directory fuzz

integration: ## Test on a real node: CRI-O, registry, mounts
	CGO_ENABLED=0 go -C test vet -tags "$(TAGS)" ./...
	CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 40m -v ./... 2>&1 | grep -vE '^=== (RUN|PAUSE|CONT|NAME)'

test-faults: deps ## Test faults of programs and disks, a part of integration, by itself
	CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 40m -run 'TestFaults|TestKilledAtSystemCall' -v ./integration 2>&1 | \
		grep -vE '^=== (RUN|PAUSE|CONT|NAME)'

bats: ## Test the command lines on a real node
	bats bats

kubelet: deps ## Test with a real kubelet, whose build takes minutes and is kept
	OCIHOLD_KUBELET=1 CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 40m -run 'TestKubelet' -v ./integration 2>&1 | \
		grep -vE '^=== (RUN|PAUSE|CONT|NAME)'

race: deps ## Test the packages, and once a real node, with Go's race detector
	CGO_ENABLED=1 GORACE=atexit_sleep_ms=0 go test -race -tags "$(TAGS)" -count=1 -timeout 30m ./...
	OCIHOLD_RACE=1 GORACE=atexit_sleep_ms=0 CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 90m -v ./integration 2>&1 | \
		grep -vE '^=== (RUN|PAUSE|CONT|NAME)'

bench: deps ## Measure, as ratios against native CRI-O in the same run
	CGO_ENABLED=0 go test -tags "$(TAGS)" -run '^$$' -bench . -benchtime 200x ./imagevolume/hostmount ./nriplugin/cmd/ocihold-guard
	CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 60m -run '^$$' -bench . -benchtime 1x ./integration

soak: deps ## Run the integration tests at their full counts, and those with a real kubelet
	OCIHOLD_SOAK=1 CGO_ENABLED=0 go -C test test -tags "$(TAGS)" -count=1 -timeout 6h -v ./... 2>&1 | grep -vE '^=== (RUN|PAUSE|CONT|NAME)'

fuzz: ## Run every fuzz target for FUZZTIME
	@CGO_ENABLED=0 test/fuzz.sh $(FUZZTIME) -tags "$(TAGS)"

lint: ## Run golangci-lint, built once and kept outside of the tree
	@test -x $(TOOLS)/$(GOLANGCI)/golangci-lint || \
		GOBIN=$(TOOLS)/$(GOLANGCI) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	$(TOOLS)/$(GOLANGCI)/golangci-lint run ./...
	cd test && $(TOOLS)/$(GOLANGCI)/golangci-lint run --config ../.golangci.yml ./...
	cd test/policy && $(TOOLS)/$(GOLANGCI)/golangci-lint run --config ../../.golangci.yml ./...

fmt: ## Format
	gofmt -w conf imagevolume nriplugin storage test

uninstall: ## Remove what install has put there
	rm -f $(DESTDIR)$(PREFIX)/bin/ocihold $(DESTDIR)$(PREFIX)/libexec/ocihold/ocihold-guard \
		$(DESTDIR)$(PREFIX)/lib/systemd/system/ocihold.service $(DESTDIR)$(PREFIX)/share/man/man8/ocihold.8

clean: ## Remove what was built here
	rm -rf bin
