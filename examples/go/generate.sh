#!/bin/sh
# Generates the Go code of the protocol into v1. Needs protoc; the generators come with `go install tool`.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
GOBIN="$bin" go install tool
set -- events subscriptions publisher consumer
options=""
for name; do # the files name no Go package
  for generator in go go-grpc; do
    options="$options --${generator}_opt=Mheadrace/proto/v1/$name.proto=example.org/headrace/v1"
  done
done
# The files import each other as headrace/proto/v1/…: they lie so in this folder.
PATH="$bin:$PATH" protoc -I ../node/protos $options \
  --go_out=. --go_opt=module=example.org/headrace --go-grpc_out=. --go-grpc_opt=module=example.org/headrace \
  $(printf 'headrace/proto/v1/%s.proto ' "$@")
